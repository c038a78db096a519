"""Which group size a rank's banks get: the checkpoint's own, a finer one, or none.

A tensor-parallel shard of W2 is cut along K, where the groups lie. If a cut falls inside a group,
scales and zeros are repeated for finer groups ("re-grouping"); CONTRACT section 6 has the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from sm70_moe.decision import Finding, Plain, Reason
from sm70_moe.facts import LayerFacts

SMALLEST_GROUP = 32
"""Finer groups would need more metadata than the kernels stream well (CONTRACT 6)."""

TP_SIZES = (1, 2, 4, 8, 16)
"""Sizes that are offered as alternatives."""

CHECK = "tensor-parallel shard"


@dataclass(frozen=True, slots=True)
class Grouping:
    """The verdict on one layer's groups.

    `widest` is the largest group that every shard can keep whole; any divisor of it works too.
    """

    widest: int
    regrouped: bool
    finding: Finding


def matrix_group(group: int, k: int) -> int:
    """Rows of one group in a matrix of `k` rows; -1 stands for one group per column."""
    return k if group == -1 else group


def group_layer(facts: LayerFacts) -> Grouping | Finding:
    """Decide how a layer's groups and its shards fit, or say why they do not.

    Needs hidden, intermediate, tensor_parallel and checkpoint_group; one that is missing gives an
    `unknown` finding.
    """
    hidden, intermediate = facts.hidden, facts.intermediate
    ranks, group = facts.tensor_parallel, facts.checkpoint_group
    if hidden is None or intermediate is None or ranks is None or group is None:
        return Finding.unknown(CHECK, expected="hidden, intermediate, tensor_parallel and checkpoint_group")
    for name, size, reason in (("hidden", hidden, Reason.HIDDEN), ("intermediate", intermediate, Reason.INTERMEDIATE)):
        if size < 1:
            return Finding.failed(CHECK, reason, f"{name} size of at least 1", size)
    if group < 1 and group != -1:
        return Finding.failed(CHECK, Reason.GROUP_SIZE, "a positive number of rows, or -1", group)
    for name, k in (("W13", hidden), ("W2", intermediate)):
        size = matrix_group(group, k)
        if k % size:
            return Finding.failed(
                CHECK,
                Reason.GROUP_INDIVISIBLE,
                f"group {size} divides K of {name}",
                f"last group of {k % size} rows, shorter than {size}: {k} = {k // size} x {size} + {k % size}",
                "writers that round the number of groups up make such files; banks have groups of one size",
            )
    if ranks < 1 or intermediate % ranks:
        return Finding.failed(
            CHECK,
            Reason.SHARD_UNEVEN,
            "intermediate divides by the ranks",
            f"{intermediate} over {ranks}",
            alternatives(hidden, intermediate, group),
        )
    per_rank = intermediate // ranks
    widest = widest_group(hidden, intermediate, group, ranks)
    if widest < SMALLEST_GROUP:
        return Finding.failed(
            CHECK,
            Reason.SHARD_CUTS_GROUP,
            f"gcd of rows per rank and group at least {SMALLEST_GROUP}",
            gcd_text(per_rank, hidden, intermediate, group, widest),
            alternatives(hidden, intermediate, group),
        )
    regrouped = per_rank % matrix_group(group, intermediate) != 0
    observed: Plain = f"{per_rank} rows per rank, group {group}, prepared in groups of up to {widest}"
    return Grouping(widest, regrouped, Finding.passed(CHECK, observed))


def gcd_text(per_rank: int, hidden: int, intermediate: int, group: int, widest: int) -> str:
    """ "gcd(176, 32) = 16"; one group for each column counts the rows of both matrices."""
    if group != -1:
        return f"gcd({per_rank}, {group}) = {widest}"
    return f"gcd({per_rank}, {intermediate}, {hidden}) = {widest} (group -1: one for each column)"


def widest_group(hidden: int, intermediate: int, group: int, ranks: int) -> int:
    """Largest group that divides both matrices' groups and every rank's rows of W2."""
    return gcd(intermediate // ranks, matrix_group(group, intermediate), matrix_group(group, hidden))


def alternatives(hidden: int, intermediate: int, group: int) -> str:
    """The tensor-parallel sizes that would work, as a hint."""
    if widest_group(hidden, intermediate, group, 1) < SMALLEST_GROUP:
        return f"groups below {SMALLEST_GROUP} stay so however the layer is cut"
    fit = [
        str(n)
        for n in TP_SIZES
        if not intermediate % n and widest_group(hidden, intermediate, group, n) >= SMALLEST_GROUP
    ]
    sizes = f"tensor parallel {', '.join(fit)}, or " if fit else ""
    return f"use {sizes}expert parallel, which cuts no matrix"


def source_group(row: int, rank_offset: int, group: int) -> int:
    """Group of the full matrix that holds a rank's local `row`."""
    return (rank_offset + row) // group
