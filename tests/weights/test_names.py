"""Which tensors belong to which layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.weights.checkpoint import Checkpoint
from sm70_moe.weights.headers import TensorEntry
from sm70_moe.weights.names import group_by_layer, layer_index


def test_layers_come_in_the_order_of_their_numbers() -> None:
    """Layer 10 comes after layer 9, shared experts and other tensors are no layers."""
    names = [f"model.layers.{n}.mlp.experts.0.up_proj.qweight" for n in (10, 9, 0)]
    others = ["model.layers.0.mlp.shared_experts.up_proj.weight", "lm_head.weight"]
    found = group_by_layer([dict.fromkeys((*names, *others), TensorEntry())])
    assert list(found) == [f"model.layers.{n}.mlp.experts" for n in (0, 9, 10)]


@pytest.mark.parametrize(
    ("layer", "index"),
    [
        ("model.layers.0.mlp.experts", 0),
        ("model.language_model.layers.17.mlp.experts", 17),
        ("model.layers.3.block_sparse_moe.experts", 3),
        ("experts", None),
    ],
)
def test_the_index_is_the_last_number_of_a_name(layer: str, index: int | None) -> None:
    """Whatever path leads to the layer."""
    assert layer_index(layer) == index


@pytest.mark.parametrize(
    "prefix", ["model.layers.4.mlp", "model.language_model.layers.4.mlp", "model.layers.4.block_sparse_moe"]
)
@pytest.mark.parametrize("matrices", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
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
