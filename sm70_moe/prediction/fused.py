"""One token in one launch: W13's tasks, a barrier of the whole grid, W2's tasks.

    launch + first + W13's steady + last sums + wait + W2's steady + W2's tail

When its tasks of W13 are done, a block arrives, asks for the weights of its first task of W2, and only then waits.
So behind the last sums of the last block two things go on at once: its results reach L2 and everybody learns of them
(the barrier), and its weights are on their way (the first touch). `wait` is the longer one. Where that is the
barrier, weights stream meanwhile, and W2 has less left to read. That other blocks may be ahead of the last, and
what their weights could take of W13's time, is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode.census import Census
from sm70_moe.kernels.machinecode.flow import Flow
from sm70_moe.kernels.machinecode.pipes import Pipe
from sm70_moe.kernels.machinecode.tasks import Tasks
from sm70_moe.prediction.hardware import Gpu
from sm70_moe.prediction.model import Parts, Setting, parts_of
from sm70_moe.prediction.occupancy import resident_blocks
from sm70_moe.prediction.queue import steady
from sm70_moe.prediction.work import OCTET, Call, Image, Work, work_of


@dataclass(frozen=True, slots=True)
class Fused:
    """A kernel that takes W13's tasks and then W2's: `first` and `second`, whose blocks are tasks.

    `blocks` of `warps` are launched, of which a multiprocessor holds `resident`: all of them are there at once.
    """

    first: Work
    second: Work
    blocks: int
    warps: int
    resident: int

    @property
    def works(self) -> tuple[Work, Work]:
        return self.first, self.second

    def tasks_each(self, work: Work) -> int:
        """Tasks of the block that has most of them."""
        return ceil(work.blocks / self.blocks)


@dataclass(frozen=True, slots=True)
class FusedParts:
    """Microseconds. `barrier` is its cost alone, `wait` what stands between the two products, and `ahead`
    the streaming of W2's weights that goes on meanwhile; `steady` is what is left of W2 after the wait.
    """

    fused: Fused
    first: Parts
    second: Parts
    sums: float
    barrier: float
    wait: float
    ahead: float
    steady: float

    @property
    def total(self) -> float:
        return self.first.launch + self.first.first + self.first.steady + self.sums + self.wait + self.rest

    @property
    def rest(self) -> float:
        """Behind the barrier."""
        return self.steady + self.second.tail

    def record(self) -> dict[str, Plain]:
        fused = self.fused
        times = {"launch": self.first.launch, "first": self.first.first, "w13": self.first.steady, "sums": self.sums}
        times |= {"wait": self.wait, "w2": self.steady, "tail": self.second.tail, "total": self.total}
        return {
            "kernel": fused.first.kernel,
            "registers": fused.first.registers,
            "shared": fused.first.shared,
            "blocks": fused.blocks,
            "warps_per_block": fused.warps,
            "resident_blocks": fused.resident,
            "tasks": {work.part: task_record(fused, work) for work in fused.works},
            "microseconds": {name: round(time, 3) for name, time in times.items()},
            "barrier": round(self.barrier, 3),
            "streamed_ahead": round(self.ahead, 3),
        }


def task_record(fused: Fused, work: Work) -> dict[str, Plain]:
    return {
        "tasks": work.blocks,
        "most_per_block": fused.tasks_each(work),
        "warps": work.warps,
        "bytes": round(work.bytes),
        "instructions": round(work.slots),
    }


def fused_of(call: Call, code: Tasks, found: Census, wanted: int, gpu: Gpu) -> Fused:
    """The kernel of a call: `wanted` blocks, or as many as are resident at once.

    Raises BackendError for machine code without a loop for each of the two products.
    """
    if len(code.each) != 2:
        raise BackendError(f"kernel {code.kernel!r}: {len(code.each)} loops of tasks are found, accepted are 2")
    resident = resident_blocks(gpu, code.threads, found.registers, found.shared)
    blocks = min(wanted, resident * gpu.multiprocessors)
    warps = -(-code.threads // 32)
    geometry = call.geometry
    grids = {
        "w13": (2 * geometry.intermediate // OCTET, call.slots),
        "w2": (geometry.hidden // OCTET, 1),
    }
    first, second = (
        _tasks_work(call, part, grid, way, found, gpu)
        for (part, grid), way in zip(grids.items(), code.each, strict=True)
    )
    once = [_times(counts, blocks * warps) for counts in code.once]
    return Fused(_more(first, once[0]), _more(second, once[1] + once[2]), blocks, warps, resident)


def _tasks_work(call: Call, part: str, grid: tuple[int, int], way: Flow, found: Census, gpu: Gpu) -> Work:
    return work_of(call, part, Image(way, gpu.architecture, found.registers, found.shared, way.threads, grid))


def _times(counts: Mapping[Pipe, int], warps: int) -> Counter[Pipe]:
    return Counter({pipe: count * warps for pipe, count in counts.items()})


def _more(work: Work, counts: Counter[Pipe]) -> Work:
    return replace(work, instructions=Counter(work.instructions) + counts)


def barrier(blocks: int, setting: Setting) -> float:
    """Microseconds from results in L2 to the activations that everybody reads next."""
    return setting.microseconds(setting.latency * setting.trips * setting.l2_cycles + setting.arrival * blocks)


def fused_parts(fused: Fused, setting: Setting) -> FusedParts:
    """The kernel in a graph, started when the one before it has ended."""
    first, second = (parts_of(work, setting, fused.resident) for work in fused.works)
    drained = setting.microseconds(setting.l2_cycles)  # the last part of W13's tail: the arrival waits for it
    cost = barrier(fused.blocks, setting)
    each = fused.second.blocks / setting.gpu.multiprocessors
    requested = second.bytes * min(1.0, fused.blocks / fused.second.blocks)
    ahead = min(requested, max(0.0, drained + cost - second.first))
    return FusedParts(
        fused=fused,
        first=first,
        second=second,
        sums=first.tail - drained,
        barrier=cost,
        wait=max(drained + cost, second.first),
        ahead=ahead,
        steady=steady(each, fused.resident, second.bytes - ahead, second.issue, second.first, setting.serial),
    )
