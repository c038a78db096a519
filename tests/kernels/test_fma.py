from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.kernels.fma import fma32
from sm70_moe.kernels.rounding import fused

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


def test_twice_rounded_would_be_wrong() -> None:
    """1 + 2**-24 + 2**-60 lies beyond the tie: rounding to FP64 first would lose that."""
    a, b, c = 2.0**-24, 1.0, 1.0
    tiny = fma(2.0**-30, 2.0**-30, 0.0)
    assert fma(a, b, c) == 1.0
    assert float(np.float32(np.float64(1) + np.float64(2.0**-24) + tiny)) == 1.0
    assert fma(2.0**-24 * (1 + 2.0**-23), 1.0, 1.0) == 1 + 2.0**-23
    assert fma(-(2.0**-40), 2.0**-40, 1 + 2.0**-23) == 1 + 2.0**-23


def test_sum_beyond_fp64() -> None:
    """A product 100 bits below the tie decides it."""
    c = 2.0**-24 + 2.0**-47  # 24 bits
    third = fma(1.0, 1.0, 0.0)
    assert third == 1.0
    assert fma(1.0 + 2.0**-12, 1.0 + 2.0**-12, c) == nearest32(Fraction(1 + 2.0**-12) ** 2 + Fraction(c))
    for a, b, c in ((2.0**-100, 1.0, 1.0), (1 + 2.0**-23, 2.0**-24, 1.0), (-(2.0**-126), 2.0**-20, 2.0**-126)):
        assert fma(a, b, c) == nearest32(Fraction(a) * Fraction(b) + Fraction(c))


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
