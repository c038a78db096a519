"""A thousand calls give the bits of the first."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

TIMES = 1000


@pytest.mark.parametrize("metadata", ["4-byte", "3-byte", "2.5-byte"])
@pytest.mark.parametrize("dependent", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_repeats_are_bitwise_equal(layers, metadata: str, dependent: bool, tokens: int) -> None:
    """With nothing between the calls that would keep them apart but the poisoning of the output."""
    subject = layers.make(metadata=metadata, dependent=dependent)
    call = subject.mixed(tokens, seed=9)
    first = subject.answer(call).view(torch.int16)
    differ = torch.zeros((), dtype=torch.int64, device=subject.device)
    out = torch.empty_like(call.x)
    for _ in range(TIMES):
        out.fill_(torch.nan)
        subject.layer(call.x, call.ids, call.weights, out)
        differ += (out.view(torch.int16) != first).sum()
    assert differ.item() == 0


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_calls_right_behind_each_other(layers, tokens: int) -> None:
    """Different calls in turn, with nothing between them at all: the layer's scratch is reused at once."""
    subject = layers.make()
    calls = [subject.mixed(tokens, seed=seed) for seed in range(8)]
    wanted = torch.stack([subject.answer(call) for call in calls]).view(torch.int16)
    outs = torch.full((TIMES // 8, *wanted.shape), torch.nan, dtype=torch.float16, device=subject.device)
    for row in outs:
        for call, out in zip(calls, row, strict=True):
            subject.layer(call.x, call.ids, call.weights, out)
    assert (outs.view(torch.int16) == wanted).all()
