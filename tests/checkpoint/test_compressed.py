"""compressed-tensors' config groups: targets, precedence, ignore lists, and what makes another packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.checkpoint.config import read_config
from sm70_moe.checkpoint.quantization import NONE, Quantization, QuantizationRules
from sm70_moe.errors import CheckpointError

LAYER = "model.layers.0.mlp.experts"
MATRICES = ("gate_proj", "up_proj", "down_proj")


def group(*targets: str, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, **weights}
    return {"targets": list(targets), "weights": given, "input_activations": None, "output_activations": None}


def rules(folder: Path, *groups: dict[str, Any], **keys: Any) -> QuantizationRules:
    declared = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{number}": one for number, one in enumerate(groups)},
        **keys,
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": declared}))
    return read_config(folder).quantization


def packed(rows: int | None = 128, bits: int | None = 4, zero_point: bool | None = False) -> Quantization:
    return Quantization("compressed-tensors", "pack-quantized", bits, rows, zero_point)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, packed()),
        ({"group_size": 32, "symmetric": False}, packed(32, zero_point=True)),
        ({"strategy": "channel", "group_size": None}, packed(-1)),
        ({"strategy": "channel", "group_size": -1}, packed(-1)),
        ({"num_bits": 8}, packed(bits=8)),
        ({"actorder": "weight"}, packed()),
        ({"actorder": "static"}, packed()),
        ({"actorder": False}, packed()),
        ({"actorder": "group"}, packed().but("act-order")),
        ({"actorder": "dynamic"}, packed().but("act-order")),
        ({"actorder": True}, packed().but("act-order")),
        ({"strategy": "tensor", "group_size": None}, packed(None).but("strategy tensor")),
        ({"type": "float"}, packed().but("type float")),
        ({"symmetric": None, "num_bits": None}, packed(bits=None, zero_point=None)),
    ],
)
def test_what_a_scheme_says(tmp_path: Path, weights: dict[str, Any], expected: Quantization) -> None:
    """Facts that fit are facts, what changes the layout is added to the packing, silence is unknown."""
    assert rules(tmp_path, group("Linear", **weights)).base == expected


@pytest.mark.parametrize(
    ("keys", "packing"),
    [
        ({"format": "float-quantized"}, "float-quantized"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"format": "mxfp4-pack-quantized"}, "mxfp4-pack-quantized"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": None}, None),
        ({"transform_config": {}, "sparsity_config": {}}, "pack-quantized"),
        ({"sparsity_config": {"format": "dense"}}, "pack-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "pack-quantized, sparsity"),
        ({"transform_config": {"config_groups": {}}}, "pack-quantized, transforms"),
    ],
)
def test_other_packings_are_named(tmp_path: Path, keys: dict[str, Any], packing: str | None) -> None:
    """A format of another name, and additions that need work at run time."""
    assert rules(tmp_path, group("Linear"), **keys).base.packing == packing


def test_quantised_activations_are_another_arithmetic(tmp_path: Path) -> None:
    """Four-bit weights with eight-bit activations are not what our routes compute."""
    scheme = {**group("Linear"), "input_activations": {"num_bits": 8}}
    assert rules(tmp_path, scheme).base.packing == "pack-quantized, quantised activations"


def test_a_group_may_have_its_own_format(tmp_path: Path) -> None:
    """`mixed-precision` says nothing itself."""
    mixed = rules(
        tmp_path, {**group("Linear"), "format": "pack-quantized"}, group("re:.*layers.1.*"), format="mixed-precision"
    )
    assert mixed.of(LAYER) == packed()
    assert mixed.of("model.layers.1.mlp.experts.0.up_proj").packing is None


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        ("model.layers.0.mlp.experts.0.up_proj", 128),
        ("model.layers.1.mlp.experts.0.up_proj", 64),
        ("model.layers.1.mlp.experts.0.down_proj", 32),
        ("model.layers.10.mlp.experts.0.up_proj", 128),
        ("model.layers.2.mlp.experts.7.gate_proj", 16),
    ],
)
def test_names_win_over_expressions_and_those_over_classes(tmp_path: Path, module: str, rows: int) -> None:
    """The precedence of the format's own library: exact name, regular expressions by text, class."""
    found = rules(
        tmp_path,
        group("Linear"),
        group("model.layers.1.mlp.experts.0.down_proj", group_size=32),
        group(r"re:.*\.layers\.1\..*", group_size=64),
        group(r"re:.*layers\.2\..*", group_size=256),
        group(r"re:.*layers\.2.*_proj", group_size=16),
    )
    # "re:.*layers\.2.*_proj" sorts before "re:.*layers\.2\..*"
    assert found.of(module).group == rows


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        ([], "compressed-tensors"),
        (["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"], "compressed-tensors"),
        (["re:.*mlp.gate.*"], "compressed-tensors"),
        ([r"re:.*layers\.0\..*"], "none"),
        (["re:.*experts.1.*"], "mixed"),
        ([f"{LAYER}.1.up_proj"], "mixed"),
        ([f"{LAYER}.{n}.{m}" for n in (0, 1) for m in MATRICES], "none"),
        (["experts.1"], "compressed-tensors"),
        (["model.layers.0"], "none"),
    ],
)
def test_ignore_lists(tmp_path: Path, ignore: list[str], expected: str) -> None:
    """Whole names, what is inside them, and expressions from the beginning; never a piece of a name."""
    found = rules(tmp_path, group("Linear"), ignore=ignore)
    assert found.of_layer(LAYER, range(2), MATRICES).format == expected


def test_targets_that_leave_the_experts_out(tmp_path: Path) -> None:
    """Then the layer is not declared as quantised; if its tensors are, it is as the only group says."""
    found = rules(tmp_path, group("re:.*self_attn.*"))
    assert found.of_layer(LAYER, range(2), MATRICES) == NONE
    assert found.stored == packed()
    two = rules(tmp_path, group("re:.*self_attn.*"), group("re:.*shared.*", group_size=32))
    assert two.stored == Quantization("compressed-tensors", "pack-quantized")


def test_a_preset_is_not_guessed(tmp_path: Path) -> None:
    """The name of a preset with its targets is legal; what it stands for is unknown here."""
    declared = {"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
    assert read_config(tmp_path).quantization.base == Quantization("compressed-tensors")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"config_groups": {"a": {"targets": "Linear", "weights": {}}}}, ["config_groups.a.targets", "'Linear'"]),
        ({"config_groups": {"a": group("Linear", num_bits="4")}}, ["config_groups.a.weights.num_bits", "'4'"]),
        ({"config_groups": {"a": group("re:(")}}, ["'('"]),
        ({"config_groups": ["Linear"]}, ["config_groups", "['Linear']"]),
        ({"ignore": ["re:["]}, ["'['"]),
    ],
)
def test_a_wrong_type_is_refused_by_key_and_value(tmp_path: Path, given: dict[str, Any], named: list[str]) -> None:
    """Nothing is read as something else."""
    with pytest.raises(CheckpointError) as caught:
        rules(tmp_path, **given)
    assert all(text in str(caught.value) for text in ["config.json", *named])


@pytest.mark.parametrize("rows", [(32, 128), (128, 32)])
def test_of_two_groups_for_one_class_the_first_counts(tmp_path: Path, rows: tuple[int, int]) -> None:
    """In the order of the file, as the format's own library takes them."""
    found = rules(tmp_path, *(group("Linear", group_size=size) for size in rows))
    assert found.base == packed(rows[0])
