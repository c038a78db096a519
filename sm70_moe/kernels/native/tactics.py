"""Tactics: other ways to cut a batch than the rule's, for tuning to choose from. Results are the same bits in all.

Every tile, number of warps and number of rounds has its kernel in the build already: a tactic is how they are launched.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sm70_moe.errors import BackendError
from sm70_moe.kernels.native.batches import TILES, Batch, Cut, cut_of, steps_with
from sm70_moe.kernels.native.case import RULE, Case
from sm70_moe.kernels.native.launch import Step

BUCKETS = (16, 32, 64, 128, 256, 512, 1024)
"""Calls of so many tokens, and of all that are shorter down to the one before, run alike. Longer calls keep the rule:
there the rule's tile is the largest, and nothing is left to choose."""

MOST_WARPS = {8: 8, 16: 8, 32: 12, 64: 12}
"""Warps of a block that a tile's launch bounds allow on every architecture (batch_kernel.cuh)."""

SHARED = {"sm_75": 64 << 10}
MOST_SHARED = 96 << 10
"""Bytes of shared memory of a block: Turing's, and what every other architecture has at least."""

KEPT = 2 << 10
"""Of them, what the system and the kernel's own variables take at most."""

FORM = re.compile(r"t(\d+)\.(\d+)x(\d+)\.(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Tactic:
    """A tile, and for W13 and W2 the warps of a block and the tiles of a warp; "t16.2x1.4x2"."""

    tile: int
    warps13: int
    rounds13: int
    warps2: int
    rounds2: int

    def __str__(self) -> str:
        return f"t{self.tile}.{self.warps13}x{self.rounds13}.{self.warps2}x{self.rounds2}"

    @classmethod
    def of(cls, text: str) -> Tactic:
        """The inverse of `str`. Raises BackendError for a text that no kernel is launched by."""
        found = FORM.fullmatch(text)
        made = cls(*map(int, found.groups())) if found else None
        if made is None or not made.possible:
            raise BackendError(f"tactic {text!r}: accepted is one that was offered, like 't16.2x1.4x2'")
        return made

    @classmethod
    def of_cut(cls, cut: Cut) -> Tactic:
        return cls(cut.tile, cut.warps13, cut.rounds13, cut.warps2, cut.rounds2)

    @property
    def possible(self) -> bool:
        """Is there a kernel, and may it be launched so? A block has an even number of warps (batch_rows.cuh)."""
        if self.tile not in TILES or min(self.rounds13, self.rounds2) < 1:
            return False
        return all(0 < warps <= MOST_WARPS[self.tile] and not warps % 2 for warps in (self.warps13, self.warps2))

    def cut(self, batch: Batch) -> Cut:
        return Cut(self.tile, self.warps13, self.rounds13, self.warps2, self.rounds2, batch.columns)


def steps(case: Case) -> tuple[Step, ...]:
    """The steps of a call of no more tokens than a piece has, cut by its tactic."""
    batch = Batch.of(case)
    return steps_with(case, cut_of(batch) if case.tactic == RULE else Tactic.of(case.tactic).cut(batch))


def bucket_of(tokens: int) -> int | None:
    """The bucket of a call; None beyond the last."""
    at = bisect_left(BUCKETS, tokens)
    return BUCKETS[at] if at < len(BUCKETS) else None


def below(bucket: int) -> int:
    """The most tokens that are too few for a bucket."""
    return max((other for other in BUCKETS if other < bucket), default=0)


def offered(case: Case) -> tuple[str, ...]:
    """What a call of a bucket's largest number of tokens may be run by: the rule first, then its neighbours."""
    rule = Tactic.of_cut(cut_of(Batch.of(case)))
    others = (str(tactic) for tactic in neighbours(rule) if tactic.possible and fits(case, tactic))
    return (RULE, *dict.fromkeys(others))


def neighbours(rule: Tactic) -> Iterator[Tactic]:
    """One thing changed at a time, and the tiles beside the rule's with the warps that they are usually given."""
    at = TILES.index(rule.tile)
    for tile in TILES[max(0, at - 1) : at + 2]:
        yield replace(rule, tile=tile, warps13=2 if tile < 32 else 4)
        yield replace(rule, tile=tile, warps13=4 if tile < 32 else 2)
    yield replace(rule, rounds13=2)
    yield replace(rule, rounds2=2 * rule.rounds2)
    yield replace(rule, rounds2=max(1, rule.rounds2 // 2))
    for warps in (2, 8):
        yield replace(rule, warps2=warps)


def fits(case: Case, tactic: Tactic) -> bool:
    """Does a block's shared memory suffice?"""
    most = SHARED.get(case.architecture, MOST_SHARED) - KEPT
    return all((step.shared or 0) <= most for step in steps_with(case, tactic.cut(Batch.of(case))))
