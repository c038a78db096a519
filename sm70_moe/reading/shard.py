"""Which part of a layer one rank holds. Spans are half-open `range`s of columns, rows or experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sm70_moe.errors import BackendError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import source_group
from sm70_moe.layout import BankShape


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part: columns of gate and up, the same rows of down, and its experts."""

    hidden: int
    intermediate: range
    experts: range

    @classmethod
    def of(cls, facts: LayerFacts) -> Share:
        """The share of the rank that the facts name; a parallelism that is not given counts as none.

        Raises BackendError if a size is unknown, a rank is out of range, or the ranks do not
        divide the intermediate size.
        """
        if facts.hidden is None or facts.intermediate is None or facts.experts is None:
            raise BackendError(f"{facts.layer}: hidden, intermediate and experts must be known to cut the layer")
        ranks, rank = _rank(facts.layer, "tensor", facts.tensor_parallel, facts.tensor_rank)
        if facts.intermediate % ranks:
            raise BackendError(f"{facts.layer}: intermediate {facts.intermediate} does not divide over {ranks} ranks")
        width = facts.intermediate // ranks
        experts = split(facts.experts, *_rank(facts.layer, "expert", facts.expert_parallel, facts.expert_rank))
        return cls(facts.hidden, range(rank * width, (rank + 1) * width), experts)

    def local_id(self, expert: int) -> int:
        """This rank's number of an expert of the whole layer; -1 for another rank's and for what is none.

        Every route treats -1 as a slot that contributes zero (CONTRACT 5).
        """
        return expert - self.experts.start if expert in self.experts else -1

    def local_ids(self, experts: int) -> tuple[int, ...]:
        """`local_id` of each of the layer's `experts`: the map from a router's ids to this rank's."""
        return tuple(map(self.local_id, range(experts)))

    @property
    def shape(self) -> BankShape:
        return BankShape(len(self.experts), self.hidden, len(self.intermediate))


def _rank(layer: str, kind: str, ranks: int | None, rank: int | None) -> tuple[int, int]:
    size, place = 1 if ranks is None else ranks, 0 if rank is None else rank
    if not 0 <= place < size:
        raise BackendError(f"{layer}: {kind} rank {place} of {size}; accepted are 0 to {size - 1}")
    return size, place


def split(count: int, ranks: int, rank: int) -> range:
    """Part `rank` of `count` things in order; the first ranks take one more if it does not divide."""
    each, rest = divmod(count, ranks)
    start = rank * each + min(rank, rest)
    return range(start, start + each + (rank < rest))


@lru_cache(maxsize=256)  # every expert of a layer asks the same
def source_groups(offset: int, rows: int, group: int, prepared: int) -> tuple[int, ...]:
    """For each prepared group of a rank's `rows`, the checkpoint's group that it lies in.

    The rank's first row is row `offset` of the full matrix. Raises BackendError if a prepared
    group would not fill the rows or would reach over a border of the checkpoint's groups.
    """
    if prepared < 1 or rows % prepared or group % prepared or offset % prepared:
        raise BackendError(
            f"groups of {prepared} rows do not fit {rows} rows from row {offset} in groups of {group}; "
            "accepted is a common divisor of the three"
        )
    return tuple(source_group(row, offset, group) for row in range(0, rows, prepared))


def covering_groups(offset: int, rows: int, group: int) -> range:
    """The checkpoint's groups that a rank's rows touch."""
    return range(offset // group, -(-(offset + rows) // group))
