from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.kernels.portable.fma import fma32
from sm70_moe.reference.rounding import fused

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = (2 - Fraction(1, 2**23)) * 2**127
TINY = Fraction(1, 2**149)


def nearest32(exact: Fraction) -> float:
    """The FP32 number nearest to a fraction, ties to even, found by integer arithmetic alone."""
    size, quantum = abs(exact), TINY
    while size / quantum >= 2**24:
        quantum *= 2
    steps, rest = divmod(size, quantum)
    if rest * 2 > quantum or (rest * 2 == quantum and steps % 2):
        steps += 1
    found = steps * quantum
    value = float("inf") if found > LARGEST else float(found)
    return -value if exact < 0 else value


def fma(a: float, b: float, c: float) -> float:
    return fma32(*(torch.tensor([v], dtype=torch.float32) for v in (a, b, c))).item()


@given(FINITE, FINITE, FINITE)
def test_one_rounding_of_the_exact_value(a: float, b: float, c: float) -> None:
    """The result is the FP32 number nearest to the exact a * b + c."""
    expected = nearest32(Fraction(a) * Fraction(b) + Fraction(c))
    assert fma(a, b, c) == expected
    assert fused(*(np.array([v]) for v in (a, b, c)))[0] == expected


@given(
    st.integers(2**23, 2**24 - 1),
    st.sampled_from([0, 1, 2, 10, 40]),
    st.sampled_from([1, -1]),
    st.sampled_from([1.0, -1.0, 2.0**-140]),
)
def test_beside_a_tie(mantissa: int, below: int, side: int, scale: float) -> None:
    """A product that is just beside a tie of c is seen, also beyond the bits of FP64 and among subnormals."""
    c = np.float32(mantissa * scale)
    half = np.spacing(c, dtype=np.float32).astype(np.float64) / 2
    a, b = np.float32(1 + side * 2.0**-23), np.float32(half)
    if b == 0:
        a, b = np.float32(2.0**-75), np.float32(2.0**-75)
    c = np.float32(c + side * np.float32(below) * np.spacing(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    assert fma(float(a), float(b), float(c)) == nearest32(exact)
    assert fused(*(np.array([float(v)]) for v in (a, b, c)))[0] == nearest32(exact)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_twice_rounded_would_be_wrong(sign: float) -> None:
    """2**-70 below a tie decides it, though FP64 rounds that onto the tie."""
    a, b, c = sign * 2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, sign * (1 + 2.0**-23)
    assert float(np.float32(np.float64(a) * b + c)) == sign * (1 + 2.0**-22)
    assert fma(a, b, c) == sign * (1 + 2.0**-23)
    assert fused(*(np.array([v]) for v in (a, b, c)))[0] == sign * (1 + 2.0**-23)


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (float("inf"), 1.0, 1.0, float("inf")),
        (float("-inf"), 1.0, 5.0, float("-inf")),
        (2.0**127, 2.0, 0.0, float("inf")),
        (2.0**127, 2.0, -(2.0**127), 2.0**127),
        (0.0, 3.0, 0.0, 0.0),
    ],
)
def test_edges(a: float, b: float, c: float, expected: float) -> None:
    """Infinity stays, overflow is decided after the sum, zero is zero."""
    assert fma(a, b, c) == expected


@pytest.mark.parametrize(("a", "b", "c"), [(float("nan"), 1.0, 0.0), (float("inf"), 0.0, 1.0)])
def test_nan(a: float, b: float, c: float) -> None:
    """What has no value is NaN."""
    assert np.isnan(fma(a, b, c))
