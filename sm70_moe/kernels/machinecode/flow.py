"""How often a kernel's instructions run: the code cut into stretches by who runs them.

There is no simulation of values. The cut follows from the shape of the code, by rules that hold for
kernels which stream and multiply:

- a block that has work never takes a detour that ends in an exit, and never goes where the code behind
  the end is (paths for warps that have parted);
- what a branch passes over and what asks all lanes of a warp (votes, shuffles), without a loop, is one
  warp's work: a branch around such code has to be decided by warps;
- a loop shares its items out among the threads of a block. What it does tells what its items are
  (`Role`); their number follows from the geometry and is not read from the code;
- a loop within a loop counts once for each round of the outer one, and one that cannot be named once;
- a loop that only reads is one thread's, which waits for others: one warp's, counted once;
- behind the last barrier and an exit under a condition only the threads of the last sums go on;
- otherwise a branch is counted as not taken: an upper bound, as both sides of a divergence are run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sm70_moe.kernels.machinecode import branches as code
from sm70_moe.kernels.machinecode.branches import Instruction
from sm70_moe.kernels.machinecode.elf import Cubin
from sm70_moe.kernels.machinecode.pipes import Pipe

THREADS = 0x05
"""Code of the `.nv.info` attribute with __launch_bounds__: three sizes of 4 bytes."""


class Role(StrEnum):
    """Who runs a stretch."""

    ALL = "all"  # every warp of a block with work
    ONE = "one"  # one warp of it
    LAST = "last"  # the threads of the last sums
    PRODUCT = "product"  # loop: tensor-core steps
    STAGING = "staging"  # loop: wide loads to shared memory
    SCALARS = "scalars"  # loop: narrow loads to shared memory
    SUMMING = "summing"  # loop: shared memory to shared memory
    STORING = "storing"  # loop: results to memory
    WAITING = "waiting"  # loop: looks at memory until others have been there
    OTHER = "other"  # a loop of no known kind


LOOPS = frozenset(Role) - {Role.ALL, Role.ONE, Role.LAST}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Instructions that the same warps run, by pipe.

    `entered` stands in front of a loop of this role: once for each warp that has an item.
    """

    role: Role
    entered: bool
    counts: Mapping[Pipe, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Flow:
    """A kernel's stretches in order, and what a block without work runs until it leaves.

    `threads` of a block as __launch_bounds__ say, 0 without them. `barriers` is on the way of a block with work.
    """

    kernel: str
    stretches: tuple[Stretch, ...]
    leaving: Mapping[Pipe, int]
    barriers: int
    threads: int

    def counts(self, role: Role, entered: bool = False) -> Counter[Pipe]:
        """Instructions of one role, by pipe."""
        return sum(
            (Counter(s.counts) for s in self.stretches if (s.role, s.entered) == (role, entered)), Counter[Pipe]()
        )


def flow(cubin: Cubin, kernel: str) -> Flow:
    """Cut a kernel. Raises BackendError if the cubin has no such kernel."""
    return cut(kernel, code.instructions(cubin, kernel), bound_of(cubin, kernel))


def cut(kernel: str, found: Sequence[Instruction], threads: int) -> Flow:
    """Cut a kernel's instructions, for blocks of so many threads (0: not known)."""
    labels = _roles(found)
    stretches: list[Stretch] = []
    start = 0
    for end in range(1, len(found) + 1):
        if end == len(found) or labels[end] != labels[start]:
            label = labels[start]
            if label is not None:
                stretches.append(Stretch(*label, Counter(i.pipe for i in found[start:end])))
            start = end
    barriers = sum(i.operation == code.BARRIER for i, label in zip(found, labels, strict=True) if label)
    return Flow(kernel, tuple(stretches), _leaving(found), barriers, threads)


Label = tuple[Role, bool] | None
"""Role and `entered`; None where a block with work never comes."""


def _roles(found: Sequence[Instruction]) -> list[Label]:
    """The label of every instruction."""
    labels: list[Label] = [(Role.ALL, False)] * len(found)
    loops = _loops(found)
    last = _last_part(found)
    for place in range(last, len(found)):
        labels[place] = (Role.LAST, False)
    for place, branch in enumerate(found):
        if branch.target is None or branch.target <= place or labels[place] is None:
            continue
        if not branch.guarded and branch.target >= end_of(found):
            continue  # the way of warps that have parted
        inside = range(place + 1, branch.target)
        label = _passed(found, inside, loops)
        if label != (Role.ALL, False):
            for at in inside:
                labels[at] = label
    for place in range(end_of(found), len(found)):
        labels[place] = None
    for first, end, role in loops:
        for at in range(first, end):
            labels[at] = (role, False) if labels[at] is not None else None
    return labels


def _passed(found: Sequence[Instruction], inside: range, loops: Sequence[tuple[int, int, Role]]) -> Label:
    """Who runs what a branch passes over."""
    part = [found[at] for at in inside]
    if any(i.leaves for i in part):
        return None
    looped = [role for first, end, role in loops if first in inside and end <= inside.stop]
    if looped:
        return looped[0], True
    asks = any(i.operation in (code.VOTE, code.SHUFFLE) for i in part)
    return (Role.ONE, False) if asks and not any(i.pipe is Pipe.TENSOR for i in part) else (Role.ALL, False)


def _loops(found: Sequence[Instruction]) -> list[tuple[int, int, Role]]:
    """First instruction, end and role of every loop; branches back from behind the end are none.

    Inner loops stand before those around them. Two that overlap without that are two ways round one loop.
    """
    ways: list[tuple[int, int]] = []
    for place, branch in enumerate(found[: end_of(found)]):
        if branch.target is None or branch.target > place:
            continue
        first, end = branch.target, place + 1
        while ways and ways[-1][0] < first < ways[-1][1]:
            first = ways.pop()[0]
        ways.append((first, end))
    return [(first, end, _kind(found[first:end])) for first, end in ways]


def _kind(body: Sequence[Instruction]) -> Role:
    """What a loop does; products win over loads, results over sums."""
    operations = {i.operation for i in body}
    if any(i.pipe is Pipe.TENSOR for i in body):
        return Role.PRODUCT
    if code.GLOBAL_STORE in operations:
        return Role.STORING
    if code.COPY in operations:
        return Role.STAGING
    if {code.GLOBAL_LOAD, code.SHARED_STORE} <= operations:
        return Role.STAGING if any(i.wide for i in body) else Role.SCALARS
    if {code.SHARED_LOAD, code.SHARED_STORE} <= operations:
        return Role.SUMMING
    return Role.WAITING if code.GLOBAL_LOAD in operations else Role.OTHER


def end_of(found: Sequence[Instruction]) -> int:
    """Behind the exit of a block with work: the last without a condition before the paths of parted warps."""
    exits = [place for place, i in enumerate(found) if i.leaves and not i.guarded]
    return exits[-1] + 1 if exits else len(found)


def _last_part(found: Sequence[Instruction]) -> int:
    """Behind the first exit under a condition after the last barrier; the end if there is none."""
    barrier = max((place for place, i in enumerate(found) if i.operation == code.BARRIER), default=len(found))
    product = max((place for place, i in enumerate(found) if i.pipe is Pipe.TENSOR), default=len(found))
    start = max(barrier, product)
    return next((p + 1 for p in range(start, len(found)) if found[p].leaves and found[p].guarded), len(found))


def _leaving(found: Sequence[Instruction]) -> Counter[Pipe]:
    """What a block without work runs: up to the first exit that no detour leads to, before any product."""
    product = next((place for place, i in enumerate(found) if i.pipe is Pipe.TENSOR), 0)
    detours = set[int]()
    for place, branch in enumerate(found[:product]):
        if branch.target is not None and place < branch.target <= product:
            inside = range(place + 1, branch.target)
            if any(found[at].leaves and not found[at].guarded for at in inside):
                detours.update(inside)
    leaves = next((at for at in range(product) if found[at].leaves and at not in detours), -1)
    return Counter(found[at].pipe for at in range(leaves + 1) if at not in detours)


def bound_of(cubin: Cubin, kernel: str) -> int:
    """Threads of a block as __launch_bounds__ say, 0 without them."""
    for attribute in cubin.attributes(f".nv.info.{kernel}"):
        if attribute.code == THREADS and len(attribute.payload) >= 4:
            return int.from_bytes(attribute.payload[:4], "little")
    return 0
