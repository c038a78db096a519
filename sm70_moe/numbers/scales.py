"""Stored scales as FP16, every value looked at once: what no scale can be is named with its place."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from sm70_moe.errors import CheckpointError

LARGEST_CODE = 15
"""Of a 4-bit code or zero, so that no weight is larger than 15 scales."""

VANISHES = 2.0**-25
"""Half of FP16's smallest number: this and everything below rounds to 0."""

LOW = 0x7FFF
"""All bits of a 16-bit float but its sign; as integers they stand in the order of the magnitudes."""
BF16_VANISHES = 0x3300
"""2^-25 in BF16 without its sign."""


def half(name: str, scales: torch.Tensor, group: int = 0, column: int = 0) -> tuple[torch.Tensor, int]:
    """Scales (..., groups, columns), FP16 or BF16, as FP16, and how many of them were made 0.

    `group` and `column` are the matrix's own numbers of the first. BF16 is rounded, which is exact from
    2^-14 to 65504. A scale so small that every weight of its group rounds to 0 (CONTRACT 8.2) becomes 0:
    no weight changes by that. Raises CheckpointError, with name, value, group and column, for NaN,
    infinity, a scale beyond FP16 and one that FP16 would make 0 although its weights are not; and with the
    name for another dtype.
    """
    if scales.dtype not in (torch.float16, torch.bfloat16):
        raise CheckpointError(f"{name} is {scales.dtype}; accepted is torch.float16 or torch.bfloat16")
    found = scales if scales.dtype is torch.float16 else scales.to(torch.float16)
    if found.numel():
        low, high = torch.aminmax(found)  # one pass; NaN comes through
        if not (-math.inf < float(low) and float(high) < math.inf):
            raise _fault(name, scales, ~found.isfinite(), group, column)
    return found, 0 if found is scales else _vanished(name, scales, group, column)


def vanished_text(found: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """What to say of tensors (by name) with scales that became 0: a sentence, or nothing."""
    tensors = dict(found)
    if not tensors:
        return ()
    others = f" and {len(tensors) - 1} more tensors" if len(tensors) > 1 else ""
    return (
        f"{next(iter(tensors))}{others}: {sum(tensors.values())} scales are so small that every weight of their "
        "groups rounds to 0; they are 0 in FP16, which changes no weight",
    )


def _vanished(name: str, scales: torch.Tensor, group: int, column: int) -> int:
    """How many BF16 scales other than 0 become 0 in FP16; raises for those whose weights do not."""
    if not scales.numel():
        return 0
    # 0 less 1 is the largest of all, so that the smallest is the smallest scale that is not 0
    magnitudes = ((scales.view(torch.int16) & LOW) - 1) & LOW
    if int(magnitudes.min()) >= BF16_VANISHES:
        return 0
    sizes = scales.double().abs()
    lost = (sizes > 0) & (sizes <= VANISHES)
    wrong = lost & (sizes * LARGEST_CODE > VANISHES)
    if wrong.any():
        raise _fault(name, scales, wrong, group, column)
    return int(lost.sum())


def _fault(name: str, scales: torch.Tensor, wrong: torch.Tensor, group: int, column: int) -> CheckpointError:
    """Names the first wrong scale."""
    place = wrong.nonzero()[0].tolist()
    value = scales[tuple(place)].item()
    if math.isnan(value):
        why = "no number"
    elif math.isinf(value):
        why = "infinite"
    elif abs(value) <= VANISHES:
        why = "too small for FP16, which would make it 0 although weights of its group are not"
    else:
        why = "too large for FP16, which ends at 65504"
    many = f"{int(wrong.sum())} of {wrong.numel()} scales"
    return CheckpointError(
        f"{name}: scale {value} of group {group + place[-2]} of rows, column {column + place[-1]} is {why} ({many}); "
        "accepted are finite numbers of FP16, and BF16 ones so small that all their weights are 0"
    )
