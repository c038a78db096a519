"""What some columns of a layer's calls must be: the reference for a proof, which has a few milliseconds.

The same arithmetic as `Reference`, on weights that were decoded once. W13 is worked out for every token
and expert once, however many calls follow; W2 on each call's own activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70_moe.reference.arithmetic import Answer, combine, product, silu
from sm70_moe.reference.rounding import FORMATS, Floats, Format, widen

Array = NDArray[Any]
NAMES = ("gate", "up", "gate_size", "up_size", "activations")


@dataclass(frozen=True, slots=True)
class Columns:
    """Some experts' columns: `gate` and `up` (H, C) and `down` (I, D) decoded, by expert, as FP64."""

    gate: Mapping[int, Floats]
    up: Mapping[int, Floats]
    down: Mapping[int, Floats]

    def of(self, x: Array, dtype: str) -> Called:
        """The columns for these tokens (M, H), whatever experts they choose."""
        kind, rows = FORMATS[dtype], widen(x)
        return Called(self, kind, {expert: self._w13(kind, rows, expert) for expert in self.gate}, rows.shape[1])

    def _w13(self, kind: Format, rows: Floats, expert: int) -> dict[str, Floats]:
        gate, gate_size = product(rows, self.gate[expert])
        up, up_size = product(rows, self.up[expert])
        with np.errstate(all="ignore"):
            activated = kind.apply(kind.apply(silu(kind.apply(gate))) * kind.apply(up))
        return {"gate": gate, "up": up, "gate_size": gate_size, "up_size": up_size, "activations": activated}


@dataclass(frozen=True, slots=True)
class Called:
    """The same for the tokens of a call; `w13` holds each expert's results (M, C)."""

    columns: Columns
    format: Format
    w13: Mapping[int, Mapping[str, Floats]]
    hidden: int

    def answer(self, ids: Array, weights: Array, inner: Array) -> Answer:
        """What M tokens must give: ids and router weights (M, k), the call's own activations `inner` (M, k, I).

        Ids that name no expert that was read are invalid slots.
        """
        tokens, top_k = ids.shape
        given, valid = widen(inner), np.isin(ids, list(self.w13))
        some = next(iter(self.w13.values()))["gate"].shape[1]
        outer = next(iter(self.columns.down.values())).shape[1]
        middle = {name: np.zeros((tokens, top_k, some)) for name in NAMES}
        slots, sizes = np.zeros((tokens, top_k, outer)), np.zeros((tokens, top_k, outer))
        for expert, found in self.w13.items():
            rows, places = np.nonzero(ids == expert)
            for name in NAMES:
                middle[name][rows, places] = found[name][rows]
            slots[rows, places], sizes[rows, places] = product(given[rows, places], self.columns.down[expert])
        products = self.format.apply(slots)
        total = combine(products, widen(weights), valid)
        terms = self.hidden, given.shape[2]
        return Answer(
            self.format, valid, **middle, slots=slots, slot_size=sizes, products=products, total=total,
            out=self.format.apply(total), terms=terms,
        )  # fmt: skip
