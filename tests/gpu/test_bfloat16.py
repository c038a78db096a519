"""BF16 activations: a layer whose engine runs them, on kernels that were compiled for its sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def subject(layers, lacking: Callable[[str], NoReturn]):
    """A layer in BF16, native for 1 to 8 tokens; skipped where nothing can be compiled or the device is older."""
    made = layers.in_bfloat16(hidden=512, intermediate=96, top_k=4, group=32)
    return lacking(made) if isinstance(made, str) else made


def wide(call: Inputs) -> Inputs:
    return Inputs(call.x.to(torch.bfloat16), call.ids, call.weights)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_bounds(subject, tokens: int) -> None:
    """Against the FP64 reference with BF16's rounding points, random and mixed ids."""
    for call in (subject.call(tokens, seed=tokens), subject.mixed(tokens, seed=tokens)):
        found = subject.judge(wide(call))
        assert found.ok, found


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_numbers_that_fp16_does_not_hold(subject, size: float) -> None:
    """Activations beyond FP16's range, and below its smallest number, are as right as any."""
    call = wide(subject.call(3, seed=9))
    found = subject.judge(Inputs((call.x.float() * size).to(torch.bfloat16), call.ids, call.weights))
    assert found.ok, found


def test_a_row_alone(subject) -> None:
    """A token's bits alone are those of its row in eight."""
    call = wide(subject.mixed(8, seed=2))
    whole = subject.answer(call)
    for row in range(8):
        part = slice(row, row + 1)
        alone = Inputs(call.x[part].clone(), call.ids[part].clone(), call.weights[part].clone())
        assert same_bits(subject.answer(alone), whole[part])
