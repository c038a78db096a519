"""Kernels whose blocks take tasks in turn: each loop of tasks cut as if a task were a kernel of its own.

A loop of tasks holds all that a kernel does: products, barriers, and results to memory. Loops of products
alone have their results behind them. How often a block goes round follows from the tasks and the grid, and
is not read from the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sm70_moe.kernels.machinecode import branches as code
from sm70_moe.kernels.machinecode.branches import Instruction
from sm70_moe.kernels.machinecode.elf import Cubin
from sm70_moe.kernels.machinecode.flow import Flow, Role, Stretch, bound_of, cut, end_of
from sm70_moe.kernels.machinecode.pipes import Pipe

LEAVES = Instruction(code.EXIT, guarded=False, wide=False)


@dataclass(frozen=True, slots=True)
class Tasks:
    """A kernel's loops of tasks in order; `threads` of a block as __launch_bounds__ say.

    `each` are the flows of one task; their `threads` are those of the block that take tasks, as their barriers
    say. `once` are the instructions in front of each loop, and behind the last, which every warp runs once.
    """

    kernel: str
    threads: int
    each: tuple[Flow, ...]
    once: tuple[Mapping[Pipe, int], ...]


def tasks(cubin: Cubin, kernel: str) -> Tasks:
    """Cut a kernel; one without such loops has no tasks. Raises BackendError if the cubin has no such kernel."""
    return cut_tasks(kernel, code.instructions(cubin, kernel), bound_of(cubin, kernel))


def cut_tasks(kernel: str, found: Sequence[Instruction], threads: int) -> Tasks:
    loops = _loops_of_tasks(found)
    each = tuple(_task(kernel, found, first, end, threads) for first, end in loops)
    edges = [0, *(edge for loop in loops for edge in loop), len(found)]
    outside = [Counter(i.pipe for i in found[start:end]) for start, end in list(pairwise(edges))[::2]]
    return Tasks(kernel, threads, each, tuple(outside))


def _loops_of_tasks(found: Sequence[Instruction]) -> list[tuple[int, int]]:
    """First instruction and end of each, in order; warps that have parted come back from behind the end."""
    ways = enumerate(found[: end_of(found)])
    loops = [(i.target, at + 1) for at, i in ways if i.target is not None and i.target <= at]
    return [(first, end) for first, end in loops if _whole(found[first:end])]


def _whole(body: Sequence[Instruction]) -> bool:
    operations = {i.operation for i in body}
    return {code.BARRIER, code.GLOBAL_STORE} <= operations and any(i.pipe is Pipe.TENSOR for i in body)


def _task(kernel: str, found: Sequence[Instruction], first: int, end: int, threads: int) -> Flow:
    """One round of a loop. What leads behind its last result is the way out of a kernel of its own.

    Behind that stand the barrier before the next task and the way back, for all of the task's warps.
    """
    body = [replace(i, target=None if i.target is None else i.target - first) for i in found[first:end]]
    join = _join(body)
    alone = [_out(i, join) for i in body[:join]]
    waited = max((i.threads for i in body if i.operation == code.BARRIER), default=0)
    made = cut(kernel, [*alone, LEAVES], waited or threads)
    behind = Stretch(Role.ALL, False, Counter(i.pipe for i in body[join:]))
    barriers = made.barriers + sum(i.operation == code.BARRIER for i in body[join:])
    return replace(made, stretches=(*_without_exit(made.stretches), behind), barriers=barriers)


def _join(body: Sequence[Instruction]) -> int:
    """Where those who have no last result go on: the nearest place behind it that a branch over it leads to."""
    result = max(at for at, i in enumerate(body) if i.operation == code.GLOBAL_STORE)
    over = [i.target for at, i in enumerate(body) if i.target is not None and at < result < i.target <= len(body)]
    return min(over, default=result + 1)


def _out(instruction: Instruction, join: int) -> Instruction:
    """A branch that leads out of the task, as an exit."""
    target = instruction.target
    leads_out = target is not None and (target >= join or target <= 0)
    return replace(LEAVES, guarded=instruction.guarded) if leads_out else instruction


def _without_exit(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """The last stretch ends with the exit that no task has."""
    left = Counter(stretches[-1].counts) - Counter({Pipe.CONTROL: 1})
    return (*stretches[:-1], replace(stretches[-1], counts=left)) if left else (*stretches[:-1],)
