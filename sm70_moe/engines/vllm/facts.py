"""What a vLLM layer says about itself, as facts for admission.

Host objects are `Any`: vLLM is not installed where this package is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.config import ModelConfig
from sm70_moe.checkpoint.names import MATRICES, SCHEMES, Scheme, layer_index
from sm70_moe.checkpoint.quantization import Quantization, QuantizationRules
from sm70_moe.engines.devices import architecture_of
from sm70_moe.engines.vllm.host import placement, whole_intermediate
from sm70_moe.errors import BackendError
from sm70_moe.facts import LayerFacts


def matrix_names(layer: Any, folder: object, prefix: str) -> dict[str, str]:
    """The checkpoint's names of gate, up and down; a layer without a gate has none for it.

    Hosts that do not say so are answered from the headers in `folder`; what has no folder yet (a name on the
    hub) has the names that most models have.
    """
    if hasattr(layer, "ckpt_gate_proj_name"):
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    else:
        scheme = scheme_in(str(folder), layer_index(prefix))
        names = (scheme.gate, scheme.up, scheme.down)
    return {matrix: name for matrix, name in zip(MATRICES, names, strict=True) if name}


@cache
def scheme_in(folder: str, index: int | None) -> Scheme:
    """How a checkpoint names the matrices of the layer with this number, or else of its first."""
    if not Path(folder, "config.json").is_file():
        return SCHEMES[0]
    layers = Checkpoint.open(Path(folder)).layers
    named = [one for one in layers if one.scheme is not None]
    found = next((one for one in named if one.index == index), named[0] if named else None)
    return SCHEMES[0] if found is None or found.scheme is None else found.scheme


def declared(rules: QuantizationRules, layer: Any, prefix: str, names: Mapping[str, str]) -> Quantization:
    """What the checkpoint declares for the experts of a layer; format "mixed" if they differ."""
    return rules.of_layer(prefix, range(layer.moe_config.num_experts), tuple(names.values()))


def layer_facts(layer: Any, prefix: str, quantization: Quantization, host: Any, model: ModelConfig) -> LayerFacts:
    """Facts of a `RoutedExperts` layer of an engine with the `VllmConfig` `host` and the `model` that it declares."""
    moe = layer.moe_config
    ranks = moe.moe_parallel_config
    said = model.of(prefix).arithmetic(layer_index(prefix))
    draft = getattr(host, "speculative_config", None)
    device = device_of(moe.device)
    return LayerFacts(
        layer=prefix,
        index=layer_index(prefix),
        hidden=moe.hidden_dim,
        intermediate=whole_intermediate(moe),
        experts=moe.num_experts,
        top_k=moe.experts_per_token,
        format=quantization.format,
        packing=quantization.packing,
        bits=quantization.bits,
        zero_point=quantization.zero_point,
        checkpoint_group=quantization.group,
        activation=activation(layer),
        gated=moe.is_act_and_mul,
        bias=moe.has_bias,
        router_weight_on_input=layer.apply_router_weight_on_input,
        arithmetic=said.arithmetic,
        doubt=said.doubt,
        activations=str(moe.in_dtype).removeprefix("torch."),
        tensor_parallel=ranks.tp_size,
        tensor_rank=ranks.tp_rank,
        expert_parallel=ranks.ep_size if ranks.use_ep else 1,
        expert_rank=ranks.ep_rank if ranks.use_ep else 0,
        device=device,
        architecture=architecture_of(device),
        max_sequences=host.scheduler_config.max_num_seqs,
        speculative_width=1 + (draft.num_speculative_tokens or 0) if draft else 1,
    )


def activation(layer: Any) -> str:
    """The name of the gate's activation; one that is clamped or scaled is another one."""
    name = str(getattr(layer.activation, "value", layer.activation))
    limit, alpha, beta = (getattr(layer, f"swiglu_{name}", None) for name in ("limit", "alpha", "beta"))
    said = [f"clamped at {limit:g}"] if limit else []
    said += [f"alpha {alpha:g}"] if alpha is not None else []
    said += [f"beta {beta:g}"] if beta is not None else []
    return " ".join((name, *said))


def device_of(device: Any) -> str:
    """ "cuda" is the process's current device: "cuda:1"."""
    import torch

    return str(torch.empty(0, device=device).device)


def require_known(layer: Any, prefix: str) -> None:
    """Refuse ways of spreading a layer that were never tried: each could give a wrong sum.

    Raises BackendError that names all of them.
    """
    moe, (strategy, shared) = layer.moe_config, placement(layer)
    ranks = moe.moe_parallel_config
    wrong = [
        f"{name} is {found!r}, accepted is {accepted!r}"
        for name, found, accepted in (
            ("data_parallel_size", ranks.dp_size, 1),
            ("prefill_context_parallel_size", ranks.pcp_size, 1),
            ("sequence parallel size", ranks.sp_size, 1),
            ("expert placement", strategy if ranks.use_ep else "linear", "linear"),
            ("number of fused shared experts", shared, 0),
            ("number of experts with replicas", moe.num_experts, moe.num_logical_experts),
            ("padded hidden size", moe.hidden_dim, moe.hidden_dim_unpadded),
            ("padded intermediate size", getattr(moe, "tp_shard_with_padding", False), False),
        )
        if found != accepted
    ]
    if wrong:
        raise BackendError(f"{prefix}: " + "; ".join(wrong))
