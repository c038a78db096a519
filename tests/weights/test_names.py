"""Which tensors belong to which layer."""

from __future__ import annotations

import pytest

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
