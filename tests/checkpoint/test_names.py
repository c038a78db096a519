"""Which tensors belong to which layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.headers import TensorEntry
from sm70_moe.checkpoint.names import SCHEMES, Census, Scheme, group_by_layer, layer_index, neighbours
from sm70_moe.errors import CheckpointError


def test_layers_come_in_the_order_of_their_numbers() -> None:
    """Layer 10 comes after layer 9, shared experts and other tensors are no layers."""
    names = [f"model.layers.{n}.mlp.experts.0.up_proj.qweight" for n in (10, 9, 0)]
    others = ["model.layers.0.mlp.shared_experts.up_proj.weight", "lm_head.weight"]
    found, rest = group_by_layer([dict.fromkeys((*names, *others), TensorEntry())])
    assert rest == others
    assert list(found) == [f"model.layers.{n}.mlp.experts" for n in (0, 9, 10)]


@pytest.mark.parametrize(
    ("layer", "index"),
    [
        ("model.layers.0.mlp.experts", 0),
        ("model.language_model.layers.17.mlp.experts", 17),
        ("model.layers.3.block_sparse_moe.experts", 3),
        ("model.layers.61.mlp.experts", 61),
        ("transformer.blocks.5.ffn.experts", 5),
        ("mtp.layers.0.mlp.experts", None),
        ("model.mtp.layers.0.mlp.experts", None),
        ("model.mtp_block.0.mlp.experts", None),
        ("model.visual.blocks.3.mlp.experts", None),
        ("experts", None),
    ],
)
def test_the_index_is_the_last_number_of_a_name(layer: str, index: int | None) -> None:
    """Whatever path leads to the layer."""
    assert layer_index(layer) == index


@pytest.mark.parametrize(
    "prefix",
    [
        "model.layers.4.mlp",  # Qwen, DeepSeek, GLM, ERNIE, OLMoE, LongCat, Laguna
        "model.language_model.layers.4.mlp",  # models with images
        "language_model.model.layers.4.mlp",
        "model.layers.4.block_sparse_moe",  # Mixtral, MiniMax
        "model.layers.4.feed_forward",
        "model.layers.4.mixer",
        "model.layers.4.moe",
    ],
)
@pytest.mark.parametrize(
    "matrices", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("linear", "linear_v", "linear_1")]
)
def test_naming_schemes(alter: Callable[..., Path], prefix: str, matrices: tuple[str, str, str]) -> None:
    """Both sets of matrix names, under any path."""

    def rename(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            new = name.replace("model.layers.0.mlp", prefix)
            for old, matrix in zip(("gate_proj", "up_proj", "down_proj"), matrices, strict=True):
                new = new.replace(old, matrix)
            arrays[new] = arrays.pop(name)

    checkpoint = Checkpoint.open(alter(rename))
    (layer,) = checkpoint.layers
    assert (layer.name, layer.index, layer.experts) == (f"{prefix}.experts", 4, 3)
    assert layer.scheme is not None
    assert layer.scheme.matrices == matrices
    assert checkpoint.check(layer).intermediate == 96


def names(*tails: str) -> frozenset[str]:
    return frozenset(tails)


@pytest.mark.parametrize(
    ("tails", "expected", "kinds"),
    [
        (names("0.gate_proj.qweight", "0.up_proj.qweight", "0.down_proj.qweight"), SCHEMES[0], {"qweight"}),
        (names("0.w1.weight", "0.w2.weight", "0.w3.weight"), SCHEMES[1], {"weight"}),
        (names("0.up_proj.weight", "0.down_proj.weight"), SCHEMES[3], {"weight"}),
        (names("gate_up_proj.qweight", "down_proj.scales"), SCHEMES[4], {"qweight", "scales"}),
        (names("gate_up_proj", "down_proj"), SCHEMES[4], {"weight"}),
        (
            names("gate_up_proj_blocks", "gate_up_proj_bias", "down_proj_scales"),
            SCHEMES[5],
            {"blocks", "bias", "scales"},
        ),
        (names("gate_proj.qweight", "up_proj.qweight", "down_proj.qweight"), SCHEMES[6], {"qweight"}),
        (names("0.wi.weight", "wo"), None, {"weight"}),
        (names("0.gate_proj.weight.absmax", "0.gate_proj.weight"), SCHEMES[0], {"weight", "weight.absmax"}),
    ],
)
def test_the_scheme_that_names_most_tensors_counts(
    tails: frozenset[str], expected: Scheme | None, kinds: set[str]
) -> None:
    """Per expert or stacked, with a gate or without; and what the matrices consist of."""
    census = Census(tails)
    assert census.scheme == expected
    assert census.kinds == kinds


def test_a_bias_may_be_a_parameter_of_its_own() -> None:
    """`gate_up_proj_bias` beside `gate_up_proj.qweight` is a bias too."""
    assert Census(names("gate_up_proj.qweight", "down_proj.qweight", "gate_up_proj_bias")).bias
    assert not Census(names("gate_up_proj.qweight", "down_proj.qweight")).bias


def test_shared_experts_and_routers_are_left_alone() -> None:
    """What stands beside the experts is told and never read, under each model's own names."""
    others = [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert.up_proj.qweight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.1.block_sparse_moe.router.weight",
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.3.mlp.shared_experts.up_proj.weight",
    ]
    layers = [f"model.layers.{n}.{block}.experts" for n, block in ((0, "mlp"), (1, "block_sparse_moe"), (3, "mlp"))]
    assert neighbours(layers, others) == {
        layers[0]: ("shared experts", "router"),
        layers[1]: ("router",),
        layers[2]: ("shared experts",),
    }


def test_layers_of_multi_token_prediction_have_no_number(alter: Callable[..., Path]) -> None:
    """`mtp.layers.0` is a layer for itself: asking for layer 0 gives the model's own."""

    def add(arrays: dict[str, Any]) -> None:
        arrays.update({name.replace("model.", "mtp.", 1): array for name, array in arrays.items() if "experts" in name})

    checkpoint = Checkpoint.open(alter(add))
    assert [(layer.name, layer.index) for layer in checkpoint.layers] == [
        ("model.layers.0.mlp.experts", 0),
        ("mtp.layers.0.mlp.experts", None),
    ]
    assert checkpoint.layer(0).name == "model.layers.0.mlp.experts"
    assert [len(layer.notes) for layer in checkpoint.layers] == [0, 1]
    assert checkpoint.check(checkpoint.layers[1]).hidden == 64


def test_a_number_beyond_the_models_layers_is_noted(alter: Callable[..., Path]) -> None:
    """DeepSeek and GLM count the layer of multi-token prediction on: it keeps its number."""

    def add(arrays: dict[str, Any]) -> None:
        arrays.update({name.replace("layers.0.", "layers.1."): array for name, array in arrays.items()})

    checkpoint = Checkpoint.open(alter(add))
    assert [layer.index for layer in checkpoint.layers] == [0, 1]
    assert [len(layer.notes) for layer in checkpoint.layers] == [0, 1]


@pytest.mark.parametrize("digits", ["²", "\u0661", "007", "9" * 5000, "1234567890"])
@pytest.mark.parametrize("head", ["model.layers.0.mlp.experts.", "model.layers."])
def test_a_number_that_is_none_is_refused_by_name(alter: Callable[..., Path], head: str, digits: str) -> None:
    """Digits of other scripts, leading zeros, and thousands of digits, in experts and in layers."""
    place = f"{head}0."

    def rename(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if name.startswith(place)]:
            arrays[f"{head}{digits}.{name.removeprefix(place)}"] = arrays.pop(name)

    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(alter(rename))
    assert f"{head}{digits[:40]}" in str(caught.value)


def test_a_layer_without_a_name(alter: Callable[..., Path]) -> None:
    """ ".experts.0..." is a layer called "experts", and nothing stands beside it."""

    def rename(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if ".experts." in name]:
            arrays[name.removeprefix("model.layers.0.mlp")] = arrays.pop(name)

    (layer,) = Checkpoint.open(alter(rename)).layers
    assert (layer.name, layer.beside) == ("experts", ())


def test_layers_that_differ_in_a_dot_stay_apart() -> None:
    """No tensor of one is taken for one of the other."""
    tails = dict.fromkeys(("a.experts.0.up_proj.weight", ".a.experts.0.up_proj.weight"), TensorEntry())
    assert sorted(group_by_layer([tails])[0]) == [".a.experts", "a.experts"]
