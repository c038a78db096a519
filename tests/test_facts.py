"""Facts: exact types, no nonsense, per-rank sizes, and what a tensor gives away without its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sm70_moe.errors import FactsError
from sm70_moe.facts import CallFacts, LayerFacts, TensorFacts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", True),
        ("hidden", 2560.0),
        ("hidden", np.int64(2560)),
        ("zero_point", 1),
        ("activations", torch.float16),
        ("device", torch.device("cpu")),
        ("layer", 3),
        ("max_sequences", 0),
        ("speculative_width", -3),
    ],
)
def test_a_fact_of_another_type_is_refused(name: str, value: Any) -> None:
    """An engine's own types would break a record much later: the fact, its value and what is accepted are named."""
    with pytest.raises(FactsError, match=rf"fact {name}="):
        LayerFacts(**{"layer": "l", name: value})


@pytest.mark.parametrize(
    ("intermediate", "ranks", "expected"),
    [(640, 4, 160), (640, 3, None), (None, 4, None), (640, None, None), (640, 0, None)],
)
def test_size_per_rank(intermediate: int | None, ranks: int | None, expected: int | None) -> None:
    """Whole numbers only; no row is dropped."""
    assert LayerFacts(layer="l", intermediate=intermediate, tensor_parallel=ranks).intermediate_per_rank == expected


@pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (8, 16), (4, 8), (1, 2), (3, 2)])
def test_alignment_is_that_of_the_address(offset: int, alignment: int) -> None:
    """A view that begins inside a buffer has the alignment of its own first element."""
    facts = TensorFacts.of(torch.empty(64, dtype=torch.float16)[offset:])
    assert facts.alignment >= alignment
    assert facts.alignment == alignment or offset in (0, 8)


def test_tensor_facts_are_shape_strides_and_dtype() -> None:
    """Read off a transposed tensor."""
    facts = TensorFacts.of(torch.empty(3, 4, dtype=torch.int64).t())
    assert (facts.dtype, facts.shape, facts.strides, facts.contiguous) == ("int64", (4, 3), (1, 4), False)


def test_packed_facts_are_those_of_a_fresh_tensor() -> None:
    """What `usual` makes up is what torch would allocate."""
    made, real = TensorFacts.packed("float16", 3, 5), TensorFacts.of(torch.empty(3, 5, dtype=torch.float16))
    assert (made.shape, made.strides, made.contiguous) == (real.shape, real.strides, real.contiguous)
    assert CallFacts.usual(7, 2560, 10).tokens == 7


@pytest.mark.parametrize("text", ["7.0", "sm70", "sm_7", "sm_7000", "cpu", "sm_70 ", ""])
def test_an_architecture_is_written_in_one_way(text: str) -> None:
    """As builds and policies write it; anything else is an error, not another GPU."""
    with pytest.raises(FactsError, match="architecture"):
        LayerFacts(layer="l", architecture=text)
    assert LayerFacts(layer="l", architecture="sm_120").architecture == "sm_120"
