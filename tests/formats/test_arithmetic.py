"""What experts compute is known from the model's declaration, or it is not known: the same answer everywhere."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sm70_moe import AdmissionRefused, AdmissionService, Settings
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.model_types import SHIPPED, read_model_types
from sm70_moe.cli.app import app
from sm70_moe.decision import Reason, Status
from sm70_moe.errors import CheckpointError, SettingsError
from sm70_moe.facts import LayerFacts
from sm70_moe.record.inspection import Kind, inspect

Make = Callable[..., Any]


@pytest.fixture
def written(tmp_path: Path, made: Make) -> Callable[..., Path]:
    """A small AWQ model whose config.json has these keys more; None takes one away."""

    def write(where: str = "model", **keys: Any) -> Path:
        layer = made("awq")
        layer.config = {key: value for key, value in {**layer.config, **keys}.items() if value is not None}
        folder: Path = layer.write(tmp_path / where)
        return folder

    return write


def facts_of(folder: Path, layer: int = 0, types: Path | None = None) -> LayerFacts:
    checkpoint = Checkpoint.open(folder, read_model_types(types))
    return checkpoint.facts(checkpoint.layers[layer], tensor_parallel=1, tensor_rank=0, device="cpu")


def surfaces(folder: Path, *options: str) -> dict[str, bool]:
    """Does each surface admit the only layer?"""
    run = CliRunner().invoke
    gc.collect()  # a service that another test has dropped tells its last decisions when it goes: not into our output
    explained = json.loads(run(app, ["explain", str(folder), "--json", *options]).stdout)["groups"]
    out = folder.parent / "out"
    with AdmissionService(Settings(assume="plain-silu" if options else None)) as service:
        served = service.admit(facts_of(folder)).supported
    return {
        "explain": explained[0]["supported"],
        "verify": run(app, ["verify", str(folder), "--tokens", "1", *options]).exit_code == 0,
        "prepare": run(app, ["prepare", str(folder), str(out), *options]).exit_code == 0,
        "service": served,
    }


EVERYWHERE = {"explain", "verify", "prepare", "service"}

OTHERS = {
    "llama4": ({"model_type": "llama4"}, (None, True, "plain")),
    "llama4-text": ({"model_type": "llama4_text"}, (None, True, "plain")),
    "laguna-on-input": ({"model_type": "laguna", "moe_apply_router_weight_on_input": True}, (None, True, "plain")),
    "any-on-input": ({"apply_router_weight_on_input": True}, (None, True, "plain")),
    "clamped": ({"model_type": "deepseek_v4", "swiglu_limit": 10.0}, ("silu clamped at 10", False, "plain")),
    "clamped-here": ({"swiglu_limits": [7.0, 0.0]}, ("silu clamped at 7", False, "plain")),
    "clamped-alike": ({"swiglu_limits": [7, 7]}, ("silu clamped at 7", False, "plain")),
    "clamped-list": ({"expert_swiglu_limit_list": [2.5, None]}, ("silu clamped at 2.5", False, "plain")),
    "norm": ({"model_type": "muse_spark"}, (None, False, "a norm after each expert")),
    "identity": (
        {"model_type": "longcat_flash", "zero_expert_num": 4},
        (None, False, "experts that hand on their input (zero_expert_num 4)"),
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss"},
        (None, False, "gate and up clamped, the gate scaled by swiglu_alpha, 1 added to up"),
    ),
    "gelu": ({"hidden_act": "gelu"}, ("gelu", False, "plain")),
}


@pytest.mark.parametrize("case", list(OTHERS))
def test_another_arithmetic_is_a_fact(case: str, written: Callable[..., Path]) -> None:
    """Reports llama4-router-weight-on-input, step35-swiglu-limits-per-layer, and others of their kind."""
    keys, (activation, weighted, arithmetic) = OTHERS[case]
    found = facts_of(written(**keys))
    assert (found.activation, found.router_weight_on_input, found.arithmetic) == (
        activation or "silu", weighted, arithmetic
    )  # fmt: skip


@pytest.mark.parametrize("case", ["llama4", "clamped-here"])
def test_no_surface_admits_another_arithmetic(case: str, written: Callable[..., Path]) -> None:
    """Nor does an assumption change what is known."""
    folder = written(**OTHERS[case][0])
    for options in ((), ("--assume", "plain-silu")):
        assert surfaces(folder, *options) == dict.fromkeys(EVERYWHERE, False)


UNKNOWN = {
    "new-type": ({"model_type": "brand_new_moe"}, "'brand_new_moe'"),
    "no-type": ({"model_type": None}, "no model_type"),
    "softcap": ({"mlp_gate_softcap": 4.0}, "mlp_gate_softcap = 4.0"),
    "alpha": ({"swiglu_alpha": 1.702}, "swiglu_alpha = 1.702"),
    "norm-key": ({"post_expert_norm": True}, "post_expert_norm = True"),
    "second-activation": ({"moe_act_fn": "gelu"}, "moe_act_fn = 'gelu'"),
    "inner-table": ({"moe_config": {"expert_norm": "rms"}}, "moe_config.expert_norm = 'rms'"),
}


@pytest.mark.parametrize("case", list(UNKNOWN))
def test_what_is_not_known_is_unknown_with_its_reason(case: str, written: Callable[..., Path]) -> None:
    """An unknown type, or a key that nobody reads and that could change what experts compute."""
    keys, named = UNKNOWN[case]
    found = facts_of(written(**keys))
    assert found.arithmetic is None
    assert named in found.doubt
    assert "--assume plain-silu" in found.doubt


@pytest.mark.parametrize(
    "keys",
    [
        {"swiglu_limit": 0}, {"swiglu_limits": [0.0, 0]}, {"swiglu_limits": None}, {"mlp_bias": False},
        {"moe_act_fn": "silu"}, {"zero_expert_num": 0}, {"final_logit_softcapping": 30.0}, {"swiglu_alpha": None},
        {"swiglu_limits_shared": [16.0, 16.0]}, {"use_expert_bias": True}, {"vision_config": {"hidden_act": "gelu"}},
        {"mamba_hidden_act": "gelu"}, {"routed_scaling_factor": 2.5}, {"moe_router_logit_softcapping": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_nothing_is_no_doubt(keys: dict[str, Any], written: Callable[..., Path]) -> None:
    """Keys that are empty, concern other parts of the model, or the router's weights only."""
    found = facts_of(written(**keys))
    assert (found.activation, found.router_weight_on_input, found.arithmetic) == ("silu", False, "plain")
    assert found.doubt == ""


def test_every_surface_refuses_the_unknown_and_takes_an_assumption(written: Callable[..., Path]) -> None:
    """One function is asked by all of them."""
    folder = written(model_type="brand_new_moe")
    assert surfaces(folder) == dict.fromkeys(EVERYWHERE, False)
    assert surfaces(folder, "--assume", "plain-silu") == dict.fromkeys(EVERYWHERE, True)


def test_the_unknown_is_refused_under_1(written: Callable[..., Path]) -> None:
    """As a fact that is unknown, with the reason as its hint."""
    facts = facts_of(written(model_type="brand_new_moe"))
    service = AdmissionService(Settings.from_env({"SM70_MOE_NATIVE_DECODE": "1"}))
    with pytest.raises(AdmissionRefused) as refused:
        service.admit(facts)
    (found,) = [f for d in refused.value.decisions for f in d.findings if f.check == "arithmetic"][:1]
    assert (found.status, found.reason) == (Status.UNKNOWN, Reason.FACT_UNKNOWN)
    assert "brand_new_moe" in found.hint


def test_inspect_says_what_an_engine_would(written: Callable[..., Path]) -> None:
    """Not readable, with the check; readable under the assumption."""
    checkpoint = Checkpoint.open(written(model_type="brand_new_moe"))
    (one,) = inspect(checkpoint)
    assert one.kind is Kind.UNREADABLE
    assert [f.check for f in one.stopped] == ["router weight on input", "arithmetic"]
    assert inspect(checkpoint, "plain-silu")[0].kind is Kind.QUANTISED


def test_limits_of_each_layer(tmp_path: Path, made: Make) -> None:
    """Report step35: layer 0 has none, layer 1 is clamped, and what is beside the numbering is not known."""
    layer = made("awq")
    for number in ("model.layers.1", "mtp.layers.0"):
        layer.tensors |= {
            name.replace("model.layers.0", number): tensor.clone()
            for name, tensor in layer.tensors.items()
            if name.startswith("model.layers.0")
        }
    layer.config |= {"model_type": "step3p5", "num_hidden_layers": 2, "swiglu_limits": [0.0, 7.0]}
    checkpoint = Checkpoint.open(layer.write(tmp_path))
    found = {
        one.name: checkpoint.facts(one, tensor_parallel=1, tensor_rank=0, device="cpu") for one in checkpoint.layers
    }
    assert {name: (facts.activation, facts.arithmetic) for name, facts in found.items()} == {
        "model.layers.0.mlp.experts": ("silu", "plain"),
        "model.layers.1.mlp.experts": ("silu clamped at 7", "plain"),
        "mtp.layers.0.mlp.experts": ("silu", None),
    }
    assert "layers 0 to 1" in found["mtp.layers.0.mlp.experts"].doubt


def test_a_users_rows_go_first(tmp_path: Path, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A type of one's own, and another word about a type of the package's; in every command by a variable."""
    own = tmp_path / "types.toml"
    own.write_text(
        'schema = 1\n[[family]]\nsource = "its paper"\nactivation = "hidden_act"\nmodel_types = ["brand_new_moe"]\n'
        '[[family]]\nsource = "a fork"\nactivation_is = "silu"\ndiffers = "a gate of its own"\n'
        'model_types = ["qwen3_moe"]\n'
    )
    new, changed = written("new", model_type="brand_new_moe"), written("changed")
    assert facts_of(new, types=own).arithmetic == "plain"
    assert facts_of(changed, types=own).arithmetic == "a gate of its own"
    assert facts_of(changed).arithmetic == "plain"
    monkeypatch.setenv("SM70_MOE_MODEL_TYPES", str(own))
    told = json.loads(CliRunner().invoke(app, ["explain", str(new), "--json"]).stdout)
    assert told["groups"][0]["supported"] is True


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("schema = 2", "schema"),
        ("no table", "table of model types"),
        ('schema = 1\n[[family]]\nsource = "x"\nmodel_types = ["a"]', "accepted is one of the two"),
        ('schema = 1\n[[family]]\nsource = ""\nactivation_is = "silu"\nmodel_types = ["a"]', "source"),
        ('schema = 1\n[[family]]\nsource = "x"\nactivation_is = "silu"\nmodel_types = ["a", "a"]', "twice"),
        ('schema = 1\n[[family]]\nsource = "x"\nactivation_is = "silu"\nmodel_types = ["a"]\nnorm = "y"', "norm"),
    ],
)
def test_a_table_that_is_none_is_refused(text: str, named: str, tmp_path: Path) -> None:
    """With the file's name."""
    file = tmp_path / "types.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=named) as caught:
        read_model_types(file)
    assert str(file) in str(caught.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_model_types(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "keys", [{"swiglu_limits": ["7"]}, {"swiglu_limit": "7"}, {"apply_router_weight_on_input": "yes"}]
)
def test_a_wrong_type_is_named(keys: dict[str, Any], written: Callable[..., Path]) -> None:
    """Key and value."""
    with pytest.raises(CheckpointError, match=next(iter(keys))):
        facts_of(written(**keys))


def test_each_row_names_its_source() -> None:
    """And no type is there twice, which reading refuses."""
    table = read_model_types()
    assert len(table.families) > 80
    assert all(family.source for family in table.families.values())
    assert SHIPPED.name == "model_types.toml"
