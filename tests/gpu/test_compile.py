"""`torch.compile`: the operator in a compiled function has the bits and the route of the layer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from sm70_moe.evidence.trial import same_bits
from sm70_moe.runtime.operator import register

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def subject(layers):
    return layers.make()


@pytest.fixture(scope="module")
def block(subject) -> Iterator:
    """A function with the operator between two others, and the same compiled in one piece."""
    handle, digest = register(subject.layer), subject.layer.plan.digest

    def plain(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.ops.sm70_moe.experts(x * 2, ids, weights, digest, handle) + 1

    yield plain, torch.compile(plain, fullgraph=True, dynamic=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.11 warns of what its compiler itself imports here
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("tokens", "route"),
    [
        (1, "qpn_m1"),
        *((tokens, "grouped_decode") for tokens in range(2, 9)),
        (9, "grouped_batch"),
        (128, "indexed_prefill"),
    ],
)
def test_compiled_equals_eager(subject, block, routes_of, tokens: int, route: str) -> None:
    """One graph for all numbers of tokens, each with its own route."""
    plain, compiled = block
    call = subject.mixed(tokens, seed=tokens)
    with routes_of(subject.layer) as taken:
        found = compiled(call.x, call.ids, call.weights)
    assert taken == [route]
    assert same_bits(found, plain(call.x, call.ids, call.weights))
    assert same_bits(found, subject.layer(call.x * 2, call.ids, call.weights) + 1)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_given_output(subject, tokens: int) -> None:
    """The operator that writes into a buffer."""
    call = subject.mixed(tokens, seed=3)
    out = torch.full_like(call.x, torch.nan)
    handle = register(subject.layer)
    torch.ops.sm70_moe.experts_out(call.x, call.ids, call.weights, subject.layer.plan.digest, handle, out=out)
    assert same_bits(out, subject.answer(call))
