"""Checkpoints that are damaged or not what they say: refused by name, before a weight is read (R17)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file

from sm70_moe.engines.transformers import Sm70MoeExperts, flips, use_sm70_moe
from sm70_moe.engines.transformers.quantizer import device_of, require_one_rank
from sm70_moe.errors import AdmissionRefused, BackendError, CheckpointError, SettingsError

EXPERTS = "model.layers.1.mlp.experts"

Tensors = dict[str, torch.Tensor]


def without(*beginnings: str) -> Callable[[Tensors], None]:
    """Removes every tensor whose name begins so."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return change


def shorter(name: str) -> Callable[[Tensors], None]:
    """Takes one row away."""
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


DAMAGES = {
    "a missing expert in the middle": (without(f"{EXPERTS}.3."), f"{EXPERTS}.3."),
    "the last expert missing": (without(f"{EXPERTS}.7."), f"{EXPERTS}.7."),
    "one tensor of one expert missing": (without(f"{EXPERTS}.2.up_proj.scales"), f"{EXPERTS}.2.up_proj.scales"),
    "short scales": (shorter(f"{EXPERTS}.5.gate_proj.scales"), f"{EXPERTS}.5.gate_proj.scales"),
    "short words": (shorter(f"{EXPERTS}.5.down_proj.qweight"), f"{EXPERTS}.5.down_proj.qweight"),
    "a whole layer of experts missing": (without(EXPERTS), EXPERTS),
    "no router": (without("model.layers.1.mlp.gate."), "model.layers.1.mlp.gate.weight"),
    "an incomplete linear": (
        without("model.layers.0.self_attn.k_proj.qzeros"),
        "model.layers.0.self_attn.k_proj.qzeros",
    ),
    "a linear with short scales": (
        shorter("model.layers.0.self_attn.q_proj.scales"),
        "model.layers.0.self_attn.q_proj.scales",
    ),
}


def test_nobody_else_could_run_what_is_not_taken(
    make: Callable[..., Any], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SM70_MOE_TAKE=none` has no meaning here, and is not read as one."""
    monkeypatch.setenv("SM70_MOE_TAKE", "none")
    with pytest.raises(SettingsError, match=r"SM70_MOE_TAKE='none'.*accepted are native and all"):
        load(make().packed)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(edit: Callable[..., Path], load: Callable[..., Any], damage: str) -> None:
    """Never random weights, never shifted ones, and the error keeps its type."""
    change, named = DAMAGES[damage]
    with pytest.raises(CheckpointError) as refused:
        load(edit(change))
    assert named in str(refused.value)


def test_a_missing_expert_of_a_renamed_family_is_refused(edit: Callable[..., Path], load: Callable[..., Any]) -> None:
    """Mixtral's layers have another name in the file than in the model; the file's is told."""
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.block_sparse_moe\.experts\.1\.w1\.qweight"):
        load(edit(without("model.layers.0.block_sparse_moe.experts.1."), family="mixtral"))


def test_a_missing_router_of_a_renamed_family_is_refused(edit: Callable[..., Path], load: Callable[..., Any]) -> None:
    """And so for what stands beside the experts; there the model's name is told."""
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate\.weight"):
        load(edit(without("model.layers.0.block_sparse_moe.gate."), family="mixtral"))


def test_a_config_with_other_sizes_is_refused(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """A model built for fewer experts than the file has would leave some out."""
    config = use_sm70_moe(make().packed)
    config.num_experts = 4
    with pytest.raises(CheckpointError, match=r"\(8, 64, 32\).*\(4, 64, 32\)"):
        load(make().packed, config=config)


def test_a_model_with_fewer_layers_loads_those(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """The file's other layers are left out, as the host leaves them out."""
    config = use_sm70_moe(make().packed)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1] if getattr(config, "layer_types", None) else None
    model = load(make().packed, config=config)
    assert [m.name for m in model.modules() if isinstance(m, Sm70MoeExperts)] == ["model.layers.0.mlp.experts"]


def test_an_unquantised_layer_stays_the_hosts(make: Callable[..., Any], edit: Callable[..., Path], load: Any) -> None:
    """A layer on the skip list keeps transformers' experts; a flip would change that one, and says so."""
    plain = load_file(make().plain / "model.safetensors")

    def change(tensors: Tensors) -> None:
        without("model.layers.0.mlp.experts.")(tensors)
        tensors.update({name: t for name, t in plain.items() if name.startswith("model.layers.0.mlp.experts.")})

    folder = edit(change, config=lambda c: c["quantization_config"]["modules_to_not_convert"].append("layers.0"))
    model = load(folder, torch.float32)
    kinds = [isinstance(layer.mlp.experts, Sm70MoeExperts) for layer in model.model.layers]
    assert kinds == [False, True]
    given = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        wanted = load(make().plain, torch.float32, plain=True)(given).logits
        assert (model(given).logits - wanted).abs().max() < 1e-4
    model.set_experts_implementation("batched_mm" if model.config._experts_implementation != "batched_mm" else "eager")
    assert [(flip.ours, flip.theirs) for flip in flips(model)] == [(1, 1)]


def test_a_missing_expert_of_an_unquantised_layer_is_refused(make: Any, edit: Callable[..., Path], load: Any) -> None:
    """The host would shift those above it there as well."""
    plain = load_file(make().plain / "model.safetensors")

    def change(tensors: Tensors) -> None:
        without("model.layers.0.mlp.experts.")(tensors)
        tensors.update({name: t for name, t in plain.items() if name.startswith("model.layers.0.mlp.experts.")})
        without("model.layers.0.mlp.experts.2.")(tensors)

    folder = edit(change, config=lambda c: c["quantization_config"]["modules_to_not_convert"].append("layers.0"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.2\."):
        load(folder)


def test_permuted_rows_of_a_linear_are_refused(edit: Callable[..., Path], load: Callable[..., Any]) -> None:
    """GPTQ's act-order shows in `g_idx` only: its values are looked at."""
    name = "model.layers.0.self_attn.k_proj.g_idx"

    def change(tensors: Tensors) -> None:
        tensors[name] = torch.arange(64, dtype=torch.int32).flip(0) // 32

    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(edit(change, form="gptq"))


def test_another_activation_is_refused(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """What the host's module would compute decides, not what the file is called."""
    config = use_sm70_moe(make().packed)
    config.hidden_act = "gelu"
    with pytest.raises(AdmissionRefused) as refused:
        load(make().packed, config=config)
    assert "activation" in {f.check for d in refused.value.decisions for f in d.obstacles}


def test_a_state_dict_is_refused(make: Callable[..., Any]) -> None:
    """Experts are read from files; tensors in memory have none."""
    from transformers import Qwen3MoeForCausalLM

    folder = make().packed
    tensors = load_file(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="state_dict"):
        Qwen3MoeForCausalLM.from_pretrained(None, config=use_sm70_moe(folder), state_dict=tensors)


def test_tensor_parallelism_of_the_host_is_refused() -> None:
    """However the version says it: a size on the model, or a config that asks for it."""
    with pytest.raises(BackendError, match="2"):
        require_one_rank(SimpleNamespace(_tp_size=2, config=SimpleNamespace()))
    with pytest.raises(BackendError):
        require_one_rank(SimpleNamespace(_tp_size=None, config=SimpleNamespace(distributed_config={"tp_size": 4})))
    require_one_rank(SimpleNamespace(_tp_size=None, config=SimpleNamespace()))


def test_an_offloaded_block_is_refused() -> None:
    """Its device is no place for banks."""
    model = torch.nn.ModuleDict({"mlp": torch.nn.Linear(8, 8, device="meta")})
    with pytest.raises(BackendError, match="mlp"):
        device_of(model, "mlp.experts")
