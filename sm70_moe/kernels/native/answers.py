"""A small layer with a known answer: made, packed and judged in numpy alone.

Written from CONTRACT 6 to 8 and not from the code that packs banks, so that a fault there is seen by
the self-test too. Only the first experts have weights, and ids name no others: the kernels for a
layer of hundreds of experts are tested in a few megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.layout import BankLayout, Metadata
from sm70_moe.reference.arithmetic import NIBBLE_OF_COLUMN, Answer, AwqExpert, AwqMatrix, Reference, silu
from sm70_moe.reference.rounding import FP16

Array = NDArray[Any]

STORED = 2
"""Experts that have weights."""

SEED = 20240229
UNIT = 2.0**-24  # unit roundoff of FP32
HALF_UNIT = 2.0**-11  # and of FP16


@dataclass(frozen=True, slots=True)
class Matrix:
    """4-bit codes (K, N), zeros and FP16 scales (K/g, N) of one matrix."""

    codes: Array
    zeros: Array
    scales: Array

    @classmethod
    def random(cls, random: np.random.Generator, rows: int, columns: int, group: int) -> Matrix:
        """Asymmetric, with scales of both signs; a product of unit rows is about 1."""
        groups = (rows // group, columns)
        scales = random.uniform(0.1, 0.3, groups) * random.choice([-1.0, 1.0], groups) / rows**0.5
        codes, zeros = random.integers(0, 16, (rows, columns)), random.integers(0, 16, groups)
        return cls(codes.astype(np.uint8), zeros.astype(np.uint8), scales.astype(np.float16))

    def awq(self, group: int) -> AwqMatrix:
        """The same matrix as a checkpoint has it."""
        return AwqMatrix(_awq_words(self.codes), _awq_words(self.zeros), self.scales, group)


@dataclass(frozen=True, slots=True)
class Known:
    """A layer, a call, and what its results must be.

    `experts` are (gate, up, down). x (M, H) FP16; ids (M, k) INT32, an invalid one among them where
    there is room; weights (M, k) FP32.
    """

    experts: tuple[tuple[Matrix, Matrix, Matrix], ...]
    x: Array
    ids: Array
    weights: Array
    answer: Answer

    @classmethod
    def make(cls, geometry: Geometry, tokens: int) -> Known:
        """A layer of this geometry with weights for its first experts, and a call of `tokens` rows."""
        random = np.random.default_rng(SEED)
        inner, outer, group = geometry.intermediate, geometry.hidden, geometry.group
        shapes = ((outer, inner), (outer, inner), (inner, outer))
        stored = min(STORED, geometry.experts)
        made = [[Matrix.random(random, *shape, group) for shape in shapes] for _ in range(stored)]
        x = random.standard_normal((tokens, outer)).astype(np.float16)
        ids = random.integers(0, stored, (tokens, geometry.top_k)).astype(np.int32)
        if geometry.top_k > 1:
            ids[0, -1] = -1
        weights = random.uniform(-1, 1, ids.shape).astype(np.float32)
        experts = tuple((gate, up, down) for gate, up, down in made)
        reference = Reference(lambda e: AwqExpert(*(m.awq(group) for m in experts[e])), geometry.experts)
        return cls(experts, x, ids, weights, reference.answer(x, ids, weights, "float16"))

    def head(self, tokens: int) -> Known:
        """The same layer and the first rows of the call: rows do not depend on each other."""
        kept = {
            f.name: getattr(self.answer, f.name)[:tokens]
            for f in fields(self.answer)
            if f.name not in ("format", "terms")
        }
        answer = replace(self.answer, **kept)
        return Known(self.experts, self.x[:tokens], self.ids[:tokens], self.weights[:tokens], answer)

    def planes(self, layout: BankLayout) -> dict[str, Array]:
        """The banks' arrays by argument name ("w13_words", ...). Raises BackendError for an unknown order."""
        banks = {
            "w13": [_join(gate, up, layout.interleaved) for gate, up, _ in self.experts],
            "w2": [down for _, _, down in self.experts],
        }
        found: dict[str, Array] = {}
        for bank, matrices in banks.items():
            parts = [pack(matrix, layout) for matrix in matrices]
            found |= {f"{bank}_{name}": np.stack([part[name] for part in parts]) for name in parts[0]}
        return found

    def complaint(self, intermediate: Array, out: Array) -> str:
        """What is wrong with the activations (M, k, I) and the output (M, H), both FP16; "" if nothing."""
        valid = self.answer.valid
        with np.errstate(all="ignore"):
            for name, found, expected, bound in (
                ("W13", intermediate[valid], self.answer.activations[valid], self._inner_bound()[valid]),
                ("output", out, self.answer.out, self._outer_bound()),
            ):
                if lost := int((~np.isfinite(found)).sum()):
                    return f"{name}: {lost} of {found.size} numbers were not written, or are not finite"
                worst = float((np.abs(found.astype(np.float64) - expected) / bound).max(initial=0.0))
                if worst > 1:
                    return f"{name}: the largest error is {worst:.3g} times its bound"
        return ""

    def _inner_bound(self) -> Array:
        """Largest error of an activation: FP32 sums in any order, then one FP16 rounding at each step."""
        answer = self.answer
        relative = 2 * answer.hidden * UNIT  # twice: tensor cores need not round to nearest
        gate = relative * answer.gate_size + 2 * HALF_UNIT * np.abs(answer.gate)
        up = relative * answer.up_size + 2 * HALF_UNIT * np.abs(answer.up)
        activated = np.abs(silu(answer.gate))
        of_silu = 1.1 * gate + 2 * HALF_UNIT * activated  # the slope of silu is below 1.1 everywhere
        return np.abs(answer.up) * of_silu + activated * up + 2 * HALF_UNIT * np.abs(answer.activations) + 2.0**-20

    def _outer_bound(self) -> Array:
        """Largest error of an output: wide, since it carries every error of the activations."""
        slots = 2.0**-7 * self.answer.slot_size + 2 * FP16.half_ulp(self.answer.slots)
        total: Array = (np.abs(self.weights)[:, :, None] * slots).sum(axis=1)
        return total + 2 * FP16.half_ulp(self.answer.out)


def pack(matrix: Matrix, layout: BankLayout) -> dict[str, Array]:
    """The planes of one matrix, by name; `layout.Order` has their shapes."""
    rows, columns = matrix.codes.shape
    words = _row_words(matrix.codes)
    if layout.order == "tile32x8":
        tiles = words.reshape(rows // 8, columns // 32, 32).transpose(1, 0, 2)
        return {"words": tiles, **_groups(matrix.scales, matrix.zeros, layout.metadata, together=True)}
    if layout.order == "octet32":
        blocks = words.reshape(rows // 32, 4, columns // 8, 8).transpose(2, 0, 3, 1)
        scales, zeros = (a.reshape(-1, columns // 8, 8).swapaxes(0, 1) for a in (matrix.scales, matrix.zeros))
        return {"words": blocks, **_groups(scales, zeros, layout.metadata, together=False)}
    raise BackendError(f"bank order {layout.order!r}: the self-test has no answer for it")


def _groups(scales: Array, zeros: Array, metadata: Metadata, together: bool) -> Mapping[str, Array]:
    """Scales and zeros, a word's columns last; `together`: the three bytes of 3-byte metadata are neighbours."""
    bits = np.ascontiguousarray(scales).view(np.uint16).astype(np.uint32)
    if metadata is Metadata.FOUR_BYTE:
        bias = FP16.round(-zeros.astype(np.float64) * scales.astype(np.float64)).astype(np.float16)
        return {"metadata": bits | bias.view(np.uint16).astype(np.uint32) << np.uint32(16)}
    if metadata is Metadata.THREE_BYTE and together:
        return {"metadata": np.stack([bits & 255, bits >> 8, zeros], axis=-1).astype(np.uint8)}
    if metadata is Metadata.THREE_BYTE:
        return {"scales": scales, "zeros": zeros}
    eights = zeros.reshape(*zeros.shape[:-1], -1, 8).astype(np.uint32)
    nibbles = np.bitwise_or.reduce(eights << np.arange(0, 32, 4, dtype=np.uint32), axis=-1)
    return {"scales": scales, "zeros": nibbles[..., 0] if not together else nibbles}


def _row_words(codes: Array) -> Array:
    """Codes (K, N) -> words (K/8, N): row k of eight in nibble ((k & 1) << 2) + (k >> 1)."""
    rows, columns = codes.shape
    k = np.arange(8, dtype=np.uint32)
    shifts = (((k & 1) << 2) + (k >> 1)) * 4
    eights = codes.reshape(rows // 8, 8, columns).astype(np.uint32)
    return np.asarray(np.bitwise_or.reduce(eights << shifts[:, None], axis=1))


def _awq_words(codes: Array) -> Array:
    """Codes (K, N) -> AWQ words (K, N/8)."""
    rows, columns = codes.shape
    shifts = np.array(NIBBLE_OF_COLUMN, np.uint32) * 4
    eights = codes.reshape(rows, columns // 8, 8).astype(np.uint32)
    return np.asarray(np.bitwise_or.reduce(eights << shifts, axis=2)).view(np.int32)


def _join(gate: Matrix, up: Matrix, interleaved: bool) -> Matrix:
    """Gate and up as one matrix: columns 2c and 2c + 1, or all gates first."""

    def both(first: Array, second: Array) -> Array:
        if interleaved:
            return np.stack((first, second), axis=-1).reshape(len(first), -1)
        return np.concatenate((first, second), axis=1)

    return Matrix(both(gate.codes, up.codes), both(gate.zeros, up.zeros), both(gate.scales, up.scales))
