"""Scales as FP16: what is rounded, what becomes 0 without a weight changing, what is refused and how it is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.scales import half, vanished_text


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bfloat16)


def refusal(scales: torch.Tensor, group: int = 0, column: int = 0) -> str:
    with pytest.raises(CheckpointError) as caught:
        half("layer.0.scales", scales, group, column)
    assert "layer.0.scales" in str(caught.value)
    return str(caught.value)


def test_bf16_scales_become_fp16() -> None:
    """Exactly where FP16 is normal, rounded to the nearest below, negative ones alike."""
    given = bf16(0.01171875, -1.5, 65280.0, 2.0**-24, 1.375 * 2.0**-23, -0.0)
    found, vanished = half("", given)
    assert found.tolist() == [[0.01171875, -1.5, 65280.0, 2.0**-24, 1.5 * 2.0**-23, 0.0]]
    assert (found.dtype, vanished) == (torch.float16, 0)


@pytest.mark.parametrize(
    ("scales", "named"),
    [
        ((1.0, 65536.0), ["1 of 2", "65536", "column 1", "too large"]),
        ((-(2.0**20),), ["1 of 1", "too large"]),
        ((2.0**-26, 1.0, -(2.0**-25)), ["2 of 3", "too small", "column 0"]),
        ((2.0**-25,), ["1 of 1", "too small", "column 0"]),
        # 15 of these are just beyond half of the smallest number
        ((1.0, 2.0**-28, 2.0**-100), ["1 of 3", "too small", "column 1"]),
        ((1.0, float("nan")), ["nan", "no number", "column 1"]),
        ((float("inf"),), ["inf", "infinite"]),
        ((-float("inf"), 0.0), ["-inf", "infinite", "column 0"]),
    ],
)
def test_a_scale_that_cannot_be_is_named(scales: tuple[float, ...], named: list[str]) -> None:
    """No number, infinity, or a zero that would change weights."""
    assert all(text in refusal(bf16(*scales)) for text in named)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_place_and_kind_of_one_bad_value(value: float, dtype: torch.dtype) -> None:
    """Group and column are the matrix's own, whatever part of it was read."""
    scales = torch.ones(3, 40, 16, dtype=dtype)
    scales[2, 7, 5] = value
    told = refusal(scales, group=10, column=160)
    assert all(text in told for text in [str(value), "group 17", "column 165", "1 of 1920"])


def test_without_a_place_it_is_that_of_the_tensor() -> None:
    """Whoever has a whole matrix gives no first group and column."""
    with pytest.raises(CheckpointError, match="group 0 of rows, column 1"):
        half("layer.0.scales", bf16(1.0, float("nan")))


def test_scales_of_dead_experts_become_0() -> None:
    """CONTRACT 8.2: every code's weight rounds to 0, so the scale may be 0; how many is told."""
    found, vanished = half("", bf16(1e-23, -1e-23, 1.0625 * 2.0**-29, 0.0, 1.0))
    assert found.tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0]]
    assert vanished == 3


@given(st.integers(0, 2**15 - 1), st.integers(0, 15), st.integers(0, 15))
def test_no_weight_changes_where_a_scale_becomes_0(bits: int, code: int, zero: int) -> None:
    """Against FP64: bias = half(-zero * scale), weight = round16(code * scale + bias), with the stored scale."""
    scales = torch.tensor([[bits]], dtype=torch.int16).view(torch.bfloat16)
    try:
        found, vanished = half("", scales)
    except CheckpointError:
        return
    if vanished:
        stored = scales.double().item()
        bias = float(np.float16(-zero * stored))
        assert float(np.float16(code * stored + bias)) == 0.0
        assert found.item() == 0.0


def test_fp16_scales_are_taken_as_they_are() -> None:
    """Not even copied."""
    given = torch.tensor([[0.0, -(2.0**-24), 65504.0]], dtype=torch.float16)
    found, vanished = half("", given)
    assert found is given
    assert vanished == 0


def test_what_is_said_of_several_tensors() -> None:
    """The first by name, the others by number, each once however often it was read."""
    assert vanished_text([]) == ()
    (text,) = vanished_text([("a.scales", 4), ("b.scales", 3), ("a.scales", 4)])
    assert text.startswith("a.scales and 1 more tensors: 7 scales")
