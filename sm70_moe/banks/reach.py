"""How far W2's sums go: experts whose sums leave FP16 before the router's weight (CONTRACT 8.5).

Weights alone do not say whether a call will: that is its activations' matter. They say from which activations on
it can, and where those are of a size that every model has, it is said once, when the banks are made.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sm70_moe.banks.metadata import bias
from sm70_moe.banks.packing import fused
from sm70_moe.layout import WORD_ROWS
from sm70_moe.numbers.rows import Rows
from sm70_moe.numbers.rowwords import unpack_rows

LARGEST = 65504.0
"""FP16's largest number."""

ORDINARY = 16.0
"""Activations between W13 and W2 that any input may give: normed inputs give some of about this size."""

NOTABLE = LARGEST / ORDINARY
"""Sum of a column's absolute weights above which ordinary activations can take it out of FP16."""

LARGEST_STEP = 15
"""Between a 4-bit code and a 4-bit zero."""

SHOWN = 8
"""Experts that a text names."""


def far_reaching(down: Rows) -> dict[int, float]:
    """Experts, by their place in the first dimension, that can leave FP16, with the largest sum of a column's
    absolute weights.

    Nearly free: the largest scale rules all experts of an ordinary model out, sums over the groups most others,
    and only what is left is decoded.
    """
    rows = down.words.shape[-2] * WORD_ROWS
    if not down.scales.numel() or LARGEST_STEP * rows * _largest(down.scales) <= NOTABLE:
        return {}
    found = {place: _reach(down.of_expert(place), rows) for place in range(len(down.scales))}
    return {place: reach for place, reach in found.items() if reach > NOTABLE}


def reach_text(reaches: Mapping[int, float], first: int = 0) -> str:
    """What to say of a layer's far-reaching experts, or nothing. `first` is the number of this rank's expert 0."""
    if not reaches:
        return ""
    widest = max(reaches, key=lambda expert: reaches[expert])
    names = [str(first + expert) for expert in sorted(reaches)]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"W2 of experts {', '.join(names[:SHOWN])}{more}: sums can leave FP16 before the router's weight, and are "
        f"infinite then by the contract; in expert {first + widest}, where the weights of one column add up to "
        f"{reaches[widest]:.6g}, from activations of {LARGEST / reaches[widest]:.3g} on (float32 has no such limit)"
    )


def _largest(scales: torch.Tensor) -> float:
    low, high = torch.aminmax(scales)
    return max(-float(low), float(high))


def _reach(one: Rows, rows: int) -> float:
    """The largest sum of a column's absolute weights, or a lower bound of what is out of the question."""
    scales, steps = one.scales.float().abs(), torch.maximum(one.zeros, LARGEST_STEP - one.zeros).float()
    most = float((scales * steps).sum(0).max()) * (rows // len(scales))
    if most <= NOTABLE:
        return 0.0
    weights = fused(unpack_rows(one.words.t().contiguous()), one.scales, bias(one.scales, one.zeros))
    return float(weights.float().abs().sum(1).max())
