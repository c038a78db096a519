"""What loading through `from_pretrained` does, and what it leaves alone."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import structlog
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import auto

from sm70_moe.engines.transformers import (
    NAME,
    PackedLinear,
    Sm70MoeExperts,
    flips,
    register,
    service_of,
    use_sm70_moe,
)
from sm70_moe.errors import AdmissionRefused, BackendError, CheckpointError, SettingsError

GIVEN = torch.tensor([[1, 5, 9, 2]])
FLAG = "SM70_MOE_GROUPED_DECODE"


def says(name: str) -> Callable[[dict[str, Any]], None]:
    """A change of config.json's quant_method."""
    return lambda content: content["quantization_config"].update(quant_method=name)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(GIVEN).logits
    return found


# taking a checkpoint over


def test_the_helper_changes_a_copy(make: Callable[..., Any]) -> None:
    """A config that is given stays as it was; the copy says our method and keeps the checkpoint's."""
    config = AutoConfig.from_pretrained(make().packed)
    ours = use_sm70_moe(config)
    assert config.quantization_config["quant_method"] == "awq"
    assert ours.quantization_config["quant_method"] == NAME
    assert ours.quantization_config["checkpoint_method"] == "awq"
    assert use_sm70_moe(ours).quantization_config == ours.quantization_config


def test_the_helper_refuses_what_cannot_be_read(make: Callable[..., Any]) -> None:
    """No quantisation, and a method of others, by name."""
    config = AutoConfig.from_pretrained(make().plain)
    with pytest.raises(CheckpointError, match="None"):
        use_sm70_moe(config)
    config.quantization_config = {"quant_method": "hqq"}
    with pytest.raises(CheckpointError, match="hqq"):
        use_sm70_moe(config)


def test_registering_alone_leaves_a_checkpoint_that_says_awq_to_the_host(
    make: Callable[..., Any], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's own quantizer is asked, and wants a package that is not there, wherever this runs."""
    monkeypatch.setattr("transformers.quantizers.quantizer_awq.is_gptqmodel_available", lambda: False)
    register()
    with pytest.raises(ImportError, match="gptqmodel"):
        load(make().packed, plain=True)


def test_registration_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call does nothing; a class of others under our name is refused, and named."""
    register()
    register()

    class Theirs:
        pass

    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, NAME, Theirs)
    with pytest.raises(BackendError, match="Theirs"):
        register()


def test_a_config_file_that_says_our_method_loads(
    edit: Callable[..., Path], make: Callable[..., Any], load: Any
) -> None:
    """Without the helper, once registered: one word in config.json turns it on."""
    register()
    folder = edit(config=says(NAME))
    assert torch.equal(logits(load(folder, plain=True)), logits(load(make().packed)))


def test_without_the_package_such_a_file_loads_random_experts(edit: Callable[..., Path]) -> None:
    """The host warns, goes on, and two loads differ: no file that this package writes says our method."""
    script = (
        "import sys, torch, transformers\n"
        "load = lambda: transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "one, two = (load().model.layers[0].mlp.experts.down_proj for _ in range(2))\n"
        "print('random' if not torch.equal(one, two) else 'equal')\n"
    )
    folder = edit(config=says(NAME))
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "random"
    assert f"Unknown quantization type, got {NAME}" in done.stderr


def test_models_that_did_not_ask_are_left_alone(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """After a load through us, a plain model has the host's experts and no hook of ours."""
    load(make().packed)
    plain = load(make().plain, plain=True)
    assert type(plain.model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts"
    assert not plain._forward_pre_hooks
    assert flips(plain) == ()
    with pytest.raises(BackendError, match="Qwen3MoeForCausalLM"):
        service_of(plain)


# decisions


def test_every_layers_decision_is_in_the_journal(
    make: Callable[..., Any], load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record for both layers, as alike layers are, and the summary."""
    monkeypatch.setenv("SM70_MOE_JOURNAL", str(tmp_path / "moe.jsonl"))
    model = load(make().packed)
    lines = [json.loads(line) for line in (tmp_path / "moe.rank0.jsonl").read_text().splitlines()]
    decided = {line["feature"]: line for line in lines if line["event"] == "moe decision"}
    assert decided["legacy"]["outcome"] == "admitted"
    assert (decided["legacy"]["first_layer"], decided["legacy"]["count"]) == ("model.layers.0.mlp.experts", 2)
    assert decided["legacy"]["facts"]["activations"] == "float16"
    assert [line["supported"] for line in lines if line["event"] == "moe summary"] == [2]
    digests = {module.digest for module in model.modules() if isinstance(module, Sm70MoeExperts)}
    assert digests == {decided["legacy"]["plan"]}


def test_a_flag_that_cannot_be_honoured_stops_the_load(
    make: Callable[..., Any], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`1` on a machine without the kernel: our error with its type, not a line in a load report."""
    monkeypatch.setenv(FLAG, "1")
    with pytest.raises(AdmissionRefused) as refused:
        load(make().packed)
    assert refused.value.layer == "model.layers.0.mlp.experts"


def test_a_flag_that_cannot_be_read_stops_the_load(
    make: Callable[..., Any], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names variable and value."""
    monkeypatch.setenv(FLAG, "true")
    with pytest.raises(SettingsError, match=f"{FLAG}.*true"):
        load(make().packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_stay_float16_in_any_model(make: Callable[..., Any], load: Callable[..., Any], dtype: Any) -> None:
    """Loaded so, and after `to(dtype)` and back: they are part of the weights' arithmetic."""
    model = load(make().packed, dtype)
    linear = model.model.layers[0].self_attn.q_proj
    before = linear.dequantised()
    assert (linear.scales.dtype, model.lm_head.weight.dtype) == (torch.float16, dtype)
    model.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(linear.dequantised(), before)
    assert logits(model).dtype == torch.float32


# saving


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_moe", "awq"), ("mixtral", "awq"), ("glm4_moe", "awq"), ("qwen3_moe", "compressed"), ("qwen3_moe", "gptq")],
)
def test_a_saved_model_is_the_checkpoint_again(
    make: Callable[..., Any], load: Callable[..., Any], tmp_path: Path, family: str, form: str
) -> None:
    """The same tensors under the same names, the same quantization_config, bit-equal outputs when loaded."""
    packed = make(family, form).packed
    model = load(packed)
    model.save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (packed, tmp_path))
    assert before.keys() == after.keys()
    assert [n for n in before if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])] == []
    configs = [json.loads((folder / "config.json").read_text()) for folder in (packed, tmp_path)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_models_config_can_be_used_again(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """`config=model.config` loads a second model through us; both run."""
    model = load(make().packed)
    again = load(make().packed, config=model.config)
    assert isinstance(again.model.layers[0].mlp.experts, Sm70MoeExperts)
    assert torch.equal(logits(model), logits(again))
    names = [m.model.layers[0].mlp.experts.handle for m in (model, again)]
    assert names == ["model.layers.0.mlp.experts", "model.layers.0.mlp.experts#2"]


# what a model of ours can and cannot do


def test_a_copy_shares_the_banks(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """`copy.deepcopy` of a model gives one that runs alike."""
    model = load(make().packed)
    copied = copy.deepcopy(model)
    assert copied.model.layers[0].mlp.experts.layer is model.model.layers[0].mlp.experts.layer
    assert torch.equal(logits(copied), logits(model))


def test_banks_do_not_move(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """`.to(device)` is refused with the layer's name; it would leave the weights behind."""
    with pytest.raises(BackendError, match=r"model\.layers\.0\.mlp\.experts"):
        load(make().packed).to("meta")


def test_a_model_may_be_called_where_gradients_are_recorded_and_not_be_trained(
    make: Callable[..., Any], load: Callable[..., Any]
) -> None:
    """Parameters of the host ask for gradients; routers and norms would silently get none through our experts."""
    model = load(make().packed, torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(ids).logits
    logits = model(ids).logits
    assert torch.equal(logits.detach(), expected)
    with pytest.raises(BackendError, match="backward through experts"):
        logits.sum().backward()


def test_weights_cannot_be_loaded_over(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """`load_state_dict` is refused even if it is not strict."""
    model = load(make().packed)
    with pytest.raises(BackendError, match=r"model\.layers\.0\.mlp\.experts"):
        model.load_state_dict(model.state_dict(), strict=False)


def test_a_compiled_model_has_no_graph_breaks(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """`fullgraph=True, dynamic=True`: traced at once, for other lengths too, with eager's bits."""
    model = load(make().packed)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for length in (4, 7):
            given = torch.arange(length)[None]
            assert torch.equal(compiled(given, use_cache=False).logits, model(given, use_cache=False).logits)


@pytest.mark.parametrize("form", ["awq", "compressed", "symmetric", "gptq"])
def test_a_packed_linear_has_the_dequantised_weights(
    make: Callable[..., Any], load: Callable[..., Any], form: str
) -> None:
    """Bit by bit, those that numpy computed in FP64."""
    twins = make("qwen3_moe", form)
    linear = load(twins.packed).model.layers[1].self_attn.k_proj
    assert isinstance(linear, PackedLinear)
    wanted = load_file(twins.plain / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(linear.dequantised(), wanted)


# the silent flip


def test_another_model_of_the_same_config_is_said(make: Callable[..., Any], load: Callable[..., Any]) -> None:
    """It switches the implementation on the shared object: ours runs as before, and one warning tells."""
    model = load(make().packed)
    before = logits(model)
    was = model.config._experts_implementation
    now = "batched_mm" if was != "batched_mm" else "eager"
    other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(make().plain))
    other.config = model.config  # as a model that was built from that object has it
    other.set_experts_implementation(now)
    with structlog.testing.capture_logs() as said:
        assert torch.equal(logits(model), before)
        logits(model)
    assert [(line["expected"], line["observed"]) for line in said if line["event"] == "moe drift"] == [(was, now)]
    flip = flips(model)[0]
    assert (flip.config, flip.before, flip.now, flip.ours, flip.theirs) == ("Qwen3MoeConfig", was, now, 2, 0)
    other.set_experts_implementation(was)
    assert flips(model) == ()


def test_a_second_model_built_from_the_config_object_flips_it(
    make: Callable[..., Any], load: Callable[..., Any]
) -> None:
    """The way in which it happens: `Model(config)` stores its implementation on the object it is given."""
    model = load(make().packed)
    was = model.config._experts_implementation
    other = type(load(make().plain, plain=True))(model.config)
    other.set_experts_implementation("batched_mm" if was != "batched_mm" else "eager")
    assert [flip.before for flip in flips(model)] == [was]
