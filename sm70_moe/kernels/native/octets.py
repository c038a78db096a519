"""How many octets of columns a block of the decode kernels takes one after the other.

One, in kernels of their own, unless a layer has so much to read that blocks come in several waves: then the streams
(w13stream.cuh, w2stream.cuh) save what every block does before its first load. The rules are those of measurements
on an H200 (bench/NOTES.md, runs 18 to 21): its multiprocessors are counted, other devices have about as many. Nothing
of a result depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

MULTIPROCESSORS = 132
WARPS = {"w13": 16, "w2": 20}
"""Warps of the streams that a multiprocessor holds, by their registers."""

MOST = 16
"""Octets of a block at most: longer streams leave multiprocessors without work at the end."""

LISTED = 16
"""Warps of a block of W2 at most, with a place for each run of each slot (w2cut.cuh)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A rank's layer, experts of the rank included, and the call's tokens."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: int


def of_w13(sizes: Sizes) -> int:
    """Octets of a block of W13."""
    slots = sizes.tokens * sizes.top_k
    if sizes.tokens > 2:  # tokens share experts: few blocks have work, and it pays to give those much
        return 8 if slots >= sizes.experts else 1
    waves = sizes.inner / 4 * slots / held("w13", min(16, ceil(sizes.hidden / 512)))
    return min(MOST, ceil(waves)) if sizes.tokens == 2 and waves >= 2.5 else 1


def of_w2(sizes: Sizes) -> int:
    """Octets of a block of W2, which then serves one token."""
    units = sizes.inner // 32
    run = run_units(units, sizes.top_k)
    warps = ceil(sizes.top_k * ceil(units / run) / 8)
    if run < 4 or warps > LISTED:
        return 1
    waves = sizes.hidden / 8 * sizes.tokens / held("w2", warps)
    full = waves / ceil(waves)  # of the last wave, whose blocks decide when the kernel ends
    return ceil(waves) if waves <= 4 and (full >= 0.9 or sizes.tokens == 2) else 1


def held(part: str, warps: int) -> int:
    """Blocks of so many warps that the device holds at once."""
    return MULTIPROCESSORS * max(1, WARPS[part] // warps)


def run_units(units: int, top_k: int) -> int:
    """Units of a run of W2: `run_units_of` of w2cut.cuh."""
    usual = 1 if units <= 8 else 2 if units < 16 else 4
    least = max(ceil(units * top_k / 128) if top_k < 8 else 1, ceil(units * 4 * top_k / 1280))
    return usual if usual >= least else ceil(least / 4) * 4
