"""What some columns of a layer's calls must be: the reference for a proof, which has a few milliseconds.

The same arithmetic as `Reference`, on weights that were decoded once, for the tokens of all calls
together: numpy's time is that of its operations, of which there are as many for one token as for twenty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70_moe.reference.arithmetic import Answer, combine, exact_step, product, silu
from sm70_moe.reference.rounding import FORMATS, Floats, Format, halves, widen

Array = NDArray[Any]


def decoded(group: int, codes: Array, zeros: Array, scales: Array) -> Floats:
    """Weights (K, C) of codes (K, C), with zeros and scales (K/group, C)."""
    wide = widen(scales)
    biases = halves(-widen(zeros) * wide)
    scale, bias = (np.repeat(part, group, axis=0)[: len(codes)] for part in (wide, biases))
    return halves(codes * scale + bias)


@dataclass(frozen=True, slots=True)
class Columns:
    """C columns of gate and up and D of down of each expert, decoded, side by side in the order of `experts`.

    w13 (H, n * 2C): gate and up of the first expert, then of the second; down (I, n * D).
    """

    experts: tuple[int, ...]
    w13: Floats
    down: Floats

    def of(self, x: Array, dtype: str) -> Called:
        """The columns for these tokens (M, H), whatever experts they choose."""
        kind, count, rows = FORMATS[dtype], len(self.experts), widen(x)
        dots, sizes = (part.reshape(len(rows), count, 2, -1).transpose(2, 1, 0, 3) for part in product(rows, self.w13))
        with np.errstate(all="ignore"):
            activated = kind.apply(kind.apply(silu(kind.apply(dots[0]))) * kind.apply(dots[1]))
        return Called(self, kind, np.stack((*dots, *sizes, activated)), rows.shape[1])


@dataclass(frozen=True, slots=True)
class Called:
    """The same for some tokens; `w13` (5, n, M, C): gate, up, their sizes and activations by expert."""

    columns: Columns
    format: Format
    w13: Floats
    hidden: int

    def answer(self, rows: Array, ids: Array, weights: Array, inner: Array) -> Answer:
        """What calls must give: `rows` (T,) are the tokens of all of them, as numbers of those that were given.

        ids and router weights (T, k), and the calls' own activations `inner` (T, k, I). Ids that name no
        expert that was read are invalid slots.
        """
        experts, given = self.columns.experts, widen(inner)
        place = np.full(ids.shape, len(experts))  # beyond the last: of no expert
        slots, sizes = np.zeros((2, *ids.shape, self.columns.down.shape[1] // len(experts)))
        for number, expert in enumerate(experts):
            tokens, at = np.nonzero(ids == expert)
            place[tokens, at] = number
            down = self.columns.down.reshape(given.shape[2], len(experts), -1)[:, number]
            slots[tokens, at], sizes[tokens, at] = product(given[tokens, at], down)
        none = np.zeros((len(self.w13), 1, *self.w13.shape[2:]))
        gate, up, gate_size, up_size, activations = np.concatenate((self.w13, none), axis=1)[:, place, rows[:, None]]
        valid, products = place < len(experts), self.format.apply(slots)
        # the bounds allow for a sum in FP32: here it may be exact, which is quicker
        total = combine(products, widen(weights), valid, exact_step)
        return Answer(
            self.format, valid, gate, up, gate_size, up_size, activations, slots, sizes, products, total,
            self.format.apply(total), terms=(self.hidden, given.shape[2]),
        )  # fmt: skip
