from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.reference.rounding import FORMATS, FP16

HALVES = np.arange(2**15, dtype=np.uint16)[:0x7C00].view(np.float16).astype(np.float64)
"""Every FP16 number from 0 to 65504, in order."""


def test_every_tie_and_its_neighbours() -> None:
    """Between any two FP16 numbers, subnormal ones too, a tie goes to the even one and its neighbours to theirs."""
    low, high = HALVES[:-1], HALVES[1:]
    middle = (low + high) / 2
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    assert np.array_equal(FP16.round(middle), even)
    assert np.array_equal(FP16.round(np.nextafter(middle, 0)), low)
    assert np.array_equal(FP16.round(np.nextafter(middle, 1e9)), high)


def test_numpy_rounds_fp64_to_fp16_once() -> None:
    """numpy's own cast from FP64 agrees at every tie and beside it; a detour over FP32 does not."""
    middle = (HALVES[:-1] + HALVES[1:]) / 2
    for values in (middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9), -np.nextafter(middle, 1e9)):
        assert np.array_equal(values.astype(np.float16).astype(np.float64), FP16.round(values))
    beside = np.nextafter(middle, 1e9)
    detour = beside.astype(np.float32).astype(np.float16).astype(np.float64)
    assert (detour != FP16.round(beside)).sum() > 10_000


@given(st.lists(st.floats(allow_nan=False, width=64), min_size=1, max_size=50))
def test_agrees_with_numpy_everywhere(values: list[float]) -> None:
    """FP16 and FP32 agree with numpy's casts on any number, overflow included."""
    array = np.array(values)
    with np.errstate(over="ignore"):
        for name, kind in (("float16", np.float16), ("float32", np.float32)):
            assert np.array_equal(FORMATS[name].round(array), array.astype(kind).astype(np.float64))


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_bfloat16_is_the_upper_half_of_fp32(value: float) -> None:
    """BF16 rounding of an FP32 number equals rounding its bits at the sixteenth, ties to even."""
    bits = int(np.array(value, np.float32).view(np.uint32))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    expected = np.array(rounded, np.uint32).view(np.float32).astype(np.float64)
    assert FORMATS["bfloat16"].round(np.array([value]))[0] == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float16", 1.0, 2.0**-11),
        ("float16", 1.999, 2.0**-11),
        ("float16", 2.0, 2.0**-10),
        ("float16", 2.0**-14, 2.0**-25),
        ("float16", 0.0, 2.0**-25),
        ("bfloat16", 1.0, 2.0**-8),
        ("float32", 1.0, 2.0**-24),
    ],
)
def test_half_ulp(name: str, value: float, expected: float) -> None:
    """Half the distance to the next number of the format; among subnormals that distance stays the same."""
    assert FORMATS[name].half_ulp(np.array([value]))[0] == expected


def test_special_values() -> None:
    """Overflow begins at 65520, NaN stays NaN, the sign of zero is kept."""
    found = FP16.round(np.array([65519.99, 65520.0, -65520.0, np.inf, -np.inf]))
    assert found.tolist() == [65504.0, np.inf, -np.inf, np.inf, -np.inf]
    assert np.isnan(FP16.round(np.array([np.nan])))[0]
    assert np.signbit(FP16.round(np.array([-(2.0**-30)])))[0]


def test_fp32_has_no_rounding_points() -> None:
    """A rounding point leaves FP32 activations alone."""
    values = np.array([1 / 3])
    assert FORMATS["float32"].apply(values)[0] == 1 / 3
    assert FORMATS["float16"].apply(values)[0] == float(np.float16(1 / 3))
