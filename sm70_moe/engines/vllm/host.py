"""Every difference between the vLLMs that the adapter speaks to, and where each has what the adapter uses.

A host is asked for what it has, never for its number: forks have numbers of their own. The versions
here are for readers, and held against the sources of every version by a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from sm70_moe.engines.vllm.tree import Tree
from sm70_moe.errors import BackendError

SUPPORTED = "vLLM 0.19.0 to 0.32.0, and the fork 1Cat-vLLM"
FORK = "1Cat-vLLM"

LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"
QUANTIZATION = f"{LAYERS}.quantization"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors.compressed_tensors"
CONFIG = f"{MOE}.config:FusedMoEConfig"
RANKS = f"{MOE}.config:FusedMoEParallelConfig"
METHOD = f"{MOE}.fused_moe_method_base:FusedMoEMethodBase"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a range of versions has something; `fork` says whether the fork has it there too."""

    target: str
    first: str = "0.19.0"
    last: str = "0.32.0"
    fork: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """Something of the host's. The first of `places` that is there counts; `without` is what is done where none is.

    A need with an empty `without` is essential: a host that lacks it is refused.
    """

    name: str
    places: tuple[Place, ...]
    without: str = ""


def everywhere(*targets: str) -> tuple[Need, ...]:
    """What every host has in one place."""
    return tuple(Need(target.rpartition(":")[2], (Place(target),)) for target in targets)


NEEDS = (
    *everywhere(
        f"{QUANTIZATION}:register_quantization_config",
        f"{QUANTIZATION}.base_config:QuantizationConfig",
        f"{QUANTIZATION}.base_config:QuantizationConfig.override_quantization_method",
        f"{QUANTIZATION}.base_config:QuantizationConfig.apply_vllm_mapper",
        f"{QUANTIZATION}.base_config:QuantizationConfig.maybe_update_config",
        f"{MOE}:FusedMoEMethodBase",
        f"{MOE}:UnquantizedFusedMoEMethod",
        f"{MOE}.config:FUSED_MOE_UNQUANTIZED_CONFIG",
        f"{COMPRESSED}:CompressedTensorsConfig",
        "vllm.config:get_current_vllm_config",
        "vllm.distributed.parallel_state:get_tp_group",
        "vllm.distributed.parallel_state:get_world_group",
        "vllm.model_executor.models.utils:WeightsMapper",
        f"{METHOD}.apply",
        f"{METHOD}.create_weights",
        f"{METHOD}.get_fused_moe_quant_config",
        *(f"{CONFIG}.{name}" for name in (
            "num_experts", "num_logical_experts", "experts_per_token", "hidden_dim", "hidden_dim_unpadded",
            "intermediate_size_per_partition", "in_dtype", "is_act_and_mul", "has_bias", "device",
            "moe_parallel_config",
        )),
        *(f"{RANKS}.{name}" for name in (
            "tp_size", "tp_rank", "ep_size", "ep_rank", "use_ep", "dp_size", "pcp_size", "sp_size",
        )),
    ),
    Need("layer of experts", (
        Place(f"{MOE}:RoutedExperts", "0.22.0"),
        Place(f"{MOE}:FusedMoE", last="0.21.0"),
    )),
    Need("AWQ config", (
        Place(f"{QUANTIZATION}.auto_awq:AutoAWQConfig", "0.24.0", fork=False),
        Place(f"{QUANTIZATION}.awq:AWQConfig", last="0.23.0"),
    )),
    Need("GPTQ config", (
        Place(f"{QUANTIZATION}.auto_gptq:AutoGPTQConfig", "0.22.0"),
        Place(f"{QUANTIZATION}.gptq:GPTQConfig", last="0.21.0", fork=False),
    )),
    Need("mapping of one name", (
        Place("vllm.model_executor.models.utils:WeightsMapper.map_name", "0.31.0", fork=False),
        Place("vllm.model_executor.models.utils:WeightsMapper._map_name", last="0.30.0"),
    )),
    Need("whole intermediate size", (
        Place(f"{CONFIG}.intermediate_size", "0.24.0", fork=False),
    ), "a rank's size, times the ranks"),
    Need("checkpoint's names of the matrices", (
        Place(f"{MOE}.routed_experts:RoutedExperts.ckpt_gate_proj_name", "0.25.0", fork=False),
    ), "read from the checkpoint's headers"),
    Need("limit of SwiGLU", (
        Place(f"{MOE}.routed_experts:RoutedExperts.swiglu_limit", "0.24.0", fork=False),
        Place(f"{MOE}.layer:FusedMoE.swiglu_limit", "0.20.0", "0.23.0"),
    ), "the host clamps nothing"),
    Need("alpha and beta of SwiGLU", (
        Place(f"{MOE}.routed_experts:RoutedExperts.swiglu_alpha", "0.24.0", fork=False),
    ), "the host has one SwiGLU"),
    Need("placement of experts", (
        Place(f"{MOE}.routed_experts:RoutedExperts.expert_map_manager", "0.24.0", fork=False),
        Place(f"{MOE}.layer:FusedMoE.expert_map_manager", "0.22.0", "0.23.0"),
        Place(f"{MOE}.layer:FusedMoE.expert_placement_strategy", last="0.21.0"),
    )),
    Need("padding of intermediate sizes", (
        Place(f"{CONFIG}.tp_shard_with_padding", "0.31.0", fork=False),
    ), "the host does not pad"),
    Need("hook over the checkpoint's names", (
        Place(f"{QUANTIZATION}.base_config:QuantizationConfig.get_checkpoint_weight_mapper", "0.30.0", fork=False),
    ), "row groups outside of experts are the host's own business"),
)  # fmt: skip

BY_NAME = {need.name: need for need in NEEDS}

APPLY = ("layer", "x", "topk_weights", "topk_ids")
"""How `apply` begins in every version: later ones add shared experts behind."""


def missing(tree: Tree) -> tuple[str, ...]:
    """What a source tree lacks of the essential, each with the places that were looked at."""
    return tuple(lacks(tree))


def lacks(tree: Tree) -> Iterator[str]:
    for need in NEEDS:
        if not need.without and place_in(tree, need) is None:
            yield f"{need.name} ({' or '.join(place.target for place in need.places)})"
    found = tree.parameters(f"{METHOD}.apply")
    if found[: len(APPLY)] != APPLY:
        yield f"apply({', '.join(APPLY)}, ...), found ({', '.join(found)})"


def place_in(tree: Tree, need: Need) -> str | None:
    """The target that this tree has, or None."""
    return next((place.target for place in need.places if tree.has(place.target)), None)


def installed_version() -> str:
    """The host's own word; its distribution may have any name. Imports vLLM's version and nothing else of it."""
    try:
        return str(import_module("vllm.version").__version__)
    except Exception:
        return "of unknown version"


@cache
def refusal() -> str:
    """Why the installed host cannot be served; empty if it can. Reads sources, once a process."""
    tree = Tree.installed("vllm")
    lack = ("vllm itself",) if tree is None else missing(tree)
    return refusal_text(installed_version(), lack) if lack else ""


def refusal_text(version: str, lack: tuple[str, ...]) -> str:
    return f"vLLM {version} lacks {'; '.join(lack)}; supported are {SUPPORTED}"


def symbol(name: str) -> Any:
    """The host's object for a need of this name; BackendError if no place has it."""
    need = BY_NAME[name]
    for place in need.places:
        module, _, path = place.target.partition(":")
        try:
            return getattr(import_module(module), path)
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not module.startswith(str(error.name)):
                raise BackendError(f"vLLM {installed_version()}: {module} does not load: {error}") from error
    raise BackendError(refusal_text(installed_version(), (f"{name} ({' or '.join(p.target for p in need.places)})",)))


def mapped_name(mapper: Any, name: str) -> str | None:
    """A checkpoint's name as the model has it; None for one that is dropped."""
    found: str | None = (getattr(mapper, "map_name", None) or mapper._map_name)(name)
    return found


def whole_intermediate(moe: Any) -> int:
    """The intermediate size before tensor parallelism, of a `FusedMoEConfig`."""
    whole = getattr(moe, "intermediate_size", None)
    return int(whole or moe.intermediate_size_per_partition * moe.moe_parallel_config.tp_size)


def placement(layer: Any) -> tuple[str, int]:
    """How experts are spread over ranks, and how many shared ones are among them."""
    placed = getattr(layer, "expert_map_manager", None)
    if placed is None:
        return str(layer.expert_placement_strategy), int(getattr(layer, "num_fused_shared_experts", 0))
    return str(placed.placement_strategy), int(placed.num_fused_shared_experts)
