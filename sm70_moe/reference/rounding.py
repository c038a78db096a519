"""Exact rounding of FP64 numbers to the activation formats, in numpy. Used by the FP64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format.

    `digits` of precision, 2**lowest the smallest positive number, 2**top the first power of two
    beyond the largest. `rounds` is False for FP32: CONTRACT 8 has no rounding points for it, so
    the reference keeps FP64 there.
    """

    name: str
    digits: int
    lowest: int
    top: int
    rounds: bool = True

    @property
    def overflow(self) -> float:
        """Values of this magnitude and above round to infinity."""
        return float(2.0**self.top - 2.0 ** (self.top - self.digits - 1))

    def round(self, values: Floats) -> Floats:
        """Nearest number of the format, ties to even, as FP64; one rounding only. `exactly`, in less time."""
        if self.name == "float16":
            return halves(values)
        if self.name == "bfloat16":
            sizes = np.abs(values)
            if ((sizes >= 2.0**-126) & (sizes < 2.0**127) | (sizes == 0)).all():  # no subnormal, and none overflows
                bits = values.view(np.int64)
                return ((bits + ((bits >> 45) & 1) + (2**44 - 1)) >> 45 << 45).view(np.float64)
        return self.exactly(values)

    def exactly(self, values: Floats) -> Floats:
        """The same for every format and every number, by its definition."""
        quantum = self.quantum(values)
        nearest = np.ldexp(np.rint(np.ldexp(values, -quantum)), quantum)
        return np.where(np.abs(nearest) >= 2.0**self.top, np.copysign(np.inf, values), nearest)

    def apply(self, values: Floats) -> Floats:
        """A rounding point of CONTRACT 8: rounds, except in FP32."""
        return self.round(values) if self.rounds else values

    def quantum(self, values: Floats) -> NDArray[np.int32]:
        """Exponent of the last bit of each value in this format."""
        mantissas, exponents = np.frexp(values)
        return np.where(mantissas == 0, self.lowest, np.maximum(exponents - self.digits, self.lowest)).astype(np.int32)

    def half_ulp(self, values: Floats) -> Floats:
        """Half the distance of neighbouring numbers of the format at each value."""
        return np.ldexp(0.5, self.quantum(values))


FORMATS = {
    "float16": Format("float16", 11, -24, 16),
    "bfloat16": Format("bfloat16", 8, -133, 128),
    "float32": Format("float32", 24, -149, 128, rounds=False),
}
"""Formats of activations, by the name that torch and numpy give them."""

FP16 = FORMATS["float16"]


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """`a * b + c` of FP32 numbers, rounded once to FP32; all values stand in FP64.

    The product is exact in FP64. If the FP64 sum was rounded onto a tie between two FP32 numbers,
    the sum's own error says on which side of the tie the exact value lies.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = a * b
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
        near = total.astype(np.float32)
        gap = total - near.astype(np.float64)
        other = np.nextafter(near, np.where(gap > 0, np.inf, -np.inf).astype(np.float32))
        tie = (gap != 0) & (near.astype(np.float64) + 2 * gap == other.astype(np.float64))
        beyond = tie & (error != 0) & ((error > 0) == (gap > 0))
        # below a tie the nearer number is `near` whichever way the tie was broken
        return np.where(beyond, other, near).astype(np.float64)


def halves(values: Floats) -> Floats:
    """FP16's nearest numbers: numpy rounds FP64 to FP16 once."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float64)


def widen(values: NDArray[Any]) -> Floats:
    """Any real array as FP64, exactly."""
    return np.asarray(values).astype(np.float64)
