"""What a layer must compute: FP64, with the rounding points of CONTRACT 8, straight from stored weights.

Independent on purpose: numpy only, its own unpacking, its own loops, and nothing of the code that
it judges. A rank's share is cut out of the whole matrices row by row, with no re-grouping step, so
that re-grouped banks are judged too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sm70_moe.reference.rounding import FORMATS, Floats, Format, fused, halves, widen

Array = NDArray[Any]
Fused = Callable[[Floats, Floats, Floats], Floats]

NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
"""CONTRACT 6: where logical column j of eight sits in its word."""


class Matrix(Protocol):
    """One quantised matrix, whole, in any format."""

    def weights(self, rows: slice, columns: slice) -> Floats:
        """Decoded FP16 weights of a part, as FP64: round16(q * scale + round16(-zero * scale))."""


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """One matrix as plain numbers: codes (K, N) and zeros (G, N) in 0..15, scales FP16 (G, N).

    `groups` (K,) is the group of each row, so that nothing is assumed about how they lie.
    """

    codes: Array
    zeros: Array
    scales: Array
    groups: Array

    def weights(self, rows: slice, columns: slice) -> Floats:
        """Decoded FP16 weights of a part of the matrix, as FP64."""
        part = widen(self.codes[rows, columns])
        return decoded(part, widen(self.zeros[:, columns]), self.scales[:, columns], self.groups[rows])


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """One AWQ `gemm` matrix as the checkpoint has it: K rows, N columns, groups of `group` rows.

    qweight INT32 (K, N/8), qzeros INT32 (K/group, N/8), scales FP16 (K/group, N). Raises
    ValueError if these disagree.
    """

    qweight: Array
    qzeros: Array
    scales: Array
    group: int

    def __post_init__(self) -> None:
        rows, words = self.qweight.shape
        groups = rows // self.group
        if self.qzeros.shape != (groups, words) or self.scales.shape != (groups, 8 * words) or rows % self.group:
            raise ValueError(
                f"qweight {self.qweight.shape}, qzeros {self.qzeros.shape}, scales {self.scales.shape}: "
                f"do not fit together with groups of {self.group} rows"
            )

    def weights(self, rows: slice, columns: slice) -> Floats:
        """Decoded FP16 weights of a part of the matrix, as FP64."""
        groups = np.arange(self.qweight.shape[0])[rows] // self.group
        codes, zeros = nibbles(self.qweight[rows], columns), nibbles(self.qzeros, columns)
        return decoded(codes, zeros, self.scales[:, columns], groups)


def decoded(codes: Floats, zeros: Floats, scales: Array, groups: Array) -> Floats:
    """Weights of codes (R, C), zeros and scales (G, C); `groups` (R,) is the group of each row."""
    wide = widen(scales)
    biases = halves(-zeros * wide)
    # 4-bit code times FP16 scale plus FP16 bias needs at most 46 bits: exact in FP64, so this rounds once
    return halves(codes * wide[groups] + biases[groups])


def nibbles(words: Array, columns: slice) -> Floats:
    """The numbers in `columns` of N, of words (rows, N/8) that hold eight logical columns each."""
    start, stop, _ = columns.indices(8 * words.shape[1])
    first = start // 8
    # as unsigned words, so that shifting a word with its sign bit set brings in no ones
    part = np.ascontiguousarray(words[:, first : -(-stop // 8)]).view(np.uint32)
    unpacked = np.empty((*part.shape, 8), np.uint8)
    for column, nibble in enumerate(NIBBLE_OF_COLUMN):
        unpacked[:, :, column] = (part >> np.uint32(4 * nibble)) & np.uint32(15)
    return widen(unpacked.reshape(len(part), -1)[:, start - 8 * first : stop - 8 * first])


@dataclass(frozen=True, slots=True)
class AwqExpert:
    """One expert's whole matrices: gate and up (H, I of all ranks), down (I of all ranks, H)."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Answer:
    """What the reference says about M tokens with k slots each. FP64 arrays; invalid slots are zero.

    gate, up (M, k, I): exact W13 products. gate_size, up_size: sums of |x||w|. activations
    (M, k, I): rounded at every rounding point. slots (M, k, H): exact W2 products, of the given
    intermediate if there was one. slot_size: sums of |a||w|. products: slots rounded.
    total (M, H): FP32 sum over the slots before its last rounding. out (M, H): rounded.
    valid (M, k) tells the valid slots. `terms` are those of a W13 and of a W2 dot product where the arrays
    hold some columns only.
    """

    format: Format
    valid: NDArray[np.bool_]
    gate: Floats
    up: Floats
    gate_size: Floats
    up_size: Floats
    activations: Floats
    slots: Floats
    slot_size: Floats
    products: Floats
    total: Floats
    out: Floats
    terms: tuple[int, int] | None = None

    @property
    def hidden(self) -> int:
        """Terms of a W13 dot product."""
        return self.terms[0] if self.terms else int(self.slots.shape[2])

    @property
    def intermediate(self) -> int:
        """Terms of a W2 dot product: I of this rank."""
        return self.terms[1] if self.terms else int(self.gate.shape[2])


@dataclass(frozen=True, slots=True)
class Reference:
    """One rank's share of a layer; `read(expert)` gives an expert's matrices when they are needed.

    `experts` counts those that ids may name. `columns` are the rank's columns of gate and up, which
    are its rows of down; the default is all of them (one rank).
    """

    read: Callable[[int], AwqExpert]
    experts: int
    columns: slice = field(default_factory=lambda: slice(None))

    def answer(self, x: Array, ids: Array, weights: Array, dtype: str, intermediate: Array | None = None) -> Answer:
        """Compute one call. Holds one decoded expert at a time, and (M, k, H) FP64 three times.

        x (M, H), ids (M, k) integers, weights (M, k), intermediate (M, k, I): real arrays, BF16
        ones widened. `dtype` names the format of the activations. With `intermediate`, W2 works on
        it instead of the reference's own activations.
        """
        with np.errstate(all="ignore"):
            return _Run(self, widen(x), ids, FORMATS[dtype], intermediate).answer(weights)


class _Run:
    """One call in progress."""

    def __init__(self, layer: Reference, x: Floats, ids: Array, kind: Format, intermediate: Array | None) -> None:
        self.layer, self.x, self.ids, self.format, self.given = layer, x, ids, kind, intermediate
        self.valid = (ids >= 0) & (ids < layer.experts)
        self.middle: dict[str, Floats] = {}
        self.wide: dict[str, Floats] = {}

    def answer(self, weights: Array) -> Answer:
        for expert in np.unique(self.ids[self.valid]).tolist():
            self.visit(self.layer.read(expert), *np.nonzero(self.ids == expert))
        if not self.middle:
            self.middle, self.wide = self.empty(self.layer_columns()), self.outputs(self.x.shape[1])
        products = self.format.apply(self.wide["slots"])
        total = combine(products, widen(weights), self.valid, fused if self.format.rounds else exact_step)
        return Answer(
            format=self.format,
            valid=self.valid,
            **self.middle,  # type: ignore[arg-type]  # names of fields that are all arrays
            **self.wide,  # type: ignore[arg-type]  # as above
            products=products,
            total=total,
            out=self.format.apply(total),
        )

    def visit(self, expert: AwqExpert, tokens: Array, slots: Array) -> None:
        """All slots (tokens[i], slots[i]) of one expert."""
        everything = slice(None)
        rows, found = self.x[tokens], {}
        for name, matrix in (("gate", expert.gate), ("up", expert.up)):
            weight = matrix.weights(everything, self.layer.columns)
            found[name], found[f"{name}_size"] = product(rows, weight)
        gate, up = self.format.apply(found["gate"]), self.format.apply(found["up"])
        found["activations"] = self.format.apply(self.format.apply(silu(gate)) * up)
        if not self.middle:
            self.middle = self.empty(gate.shape[1])
        for name, values in found.items():
            self.middle[name][tokens, slots] = values
        inner = found["activations"] if self.given is None else widen(self.given[tokens, slots])
        down = expert.down.weights(self.layer.columns, everything)
        if not self.wide:
            self.wide = self.outputs(down.shape[1])
        self.wide["slots"][tokens, slots], self.wide["slot_size"][tokens, slots] = product(inner, down)

    def empty(self, intermediate: int) -> dict[str, Floats]:
        names = ("gate", "up", "gate_size", "up_size", "activations")
        return {name: np.zeros((*self.ids.shape, intermediate)) for name in names}

    def outputs(self, hidden: int) -> dict[str, Floats]:
        return {name: np.zeros((*self.ids.shape, hidden)) for name in ("slots", "slot_size")}

    def layer_columns(self) -> int:
        """I of the rank when no slot was valid, and so no expert was read: from the given one, or 0."""
        return 0 if self.given is None else self.given.shape[2]


def product(rows: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """rows (n, K) times weight (K, N), and the same of absolute values."""
    return rows @ weight, np.abs(rows) @ np.abs(weight)


def silu(gate: Floats) -> Floats:
    """gate / (1 + exp(-gate)); NaN for minus infinity, as in FP32."""
    with np.errstate(over="ignore"):  # an exponential that is infinite makes the quotient the zero that it should be
        return gate / (1.0 + np.exp(-gate))


def combine(products: Floats, weights: Floats, valid: NDArray[np.bool_], step: Fused = fused) -> Floats:
    """Multiply-add over the slots in the router's order, by default each step rounded once to FP32.

    products (M, k, H), weights and valid (M, k); the sum (M, H). `step` computes a * b + c.
    """
    total = np.zeros((products.shape[0], products.shape[2]))
    with np.errstate(all="ignore"):
        for slot in range(products.shape[1]):
            more = step(weights[:, slot, None], products[:, slot], total)
            total = np.where(valid[:, slot, None], more, total)
    return total


def exact_step(a: Floats, b: Floats, c: Floats) -> Floats:
    """The multiply-add for FP32 activations, whose slots were not rounded to begin with: FP64."""
    return a * b + c
