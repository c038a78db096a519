"""The equations: microseconds of a kernel, and of a layer.

For one kernel:

    first  = latency * (L2 + DRAM cycles) / clock             ids, then the first weights
    bytes  = max(bytes / reached bandwidth, cached / L2 bandwidth)
    issue  = max(issue slots, cycles of the busiest port) / efficiency / clock, on the fullest multiprocessor
    tail   = (last sums * cycles of a dependent instruction + L2 cycles) / clock

and launch + first + steady + tail in all, where `steady` is what bytes and issue take together (`queue`). A layer is
its kernels one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from sm70_moe.kernels.machinecode.pipes import Pipe
from sm70_moe.prediction.hardware import Gpu
from sm70_moe.prediction.occupancy import resident_blocks
from sm70_moe.prediction.parameters import Parameters
from sm70_moe.prediction.queue import steady
from sm70_moe.prediction.work import Work

DEPENDENT_CYCLES = 6
"""Cycles between an instruction and the next that needs its result: 4 to 6 on Volta (arXiv:1804.06826, 4.1)."""

LAUNCH, FIRST, BYTES, ISSUE, TENSOR, TAIL = "launch", "first touch", "bytes", "issue", "tensor", "tail"


@dataclass(frozen=True, slots=True)
class Setting:
    """A GPU as it runs at one moment: GHz, GB/s, cycles, microseconds of a launch, trips of a barrier."""

    gpu: Gpu
    clock: float
    reached: float
    launch: float
    l2_cycles: float
    dram_cycles: float
    efficiency: float
    serial: float
    latency: float
    trips: float
    arrival: float

    @classmethod
    def likely(cls, gpu: Gpu, fitted: Parameters) -> Setting:
        """The likely value of each fact; the fitted value where there is no fact."""
        return cls(
            gpu=gpu,
            clock=gpu.clock.likely,
            reached=gpu.reached.likely if gpu.reached else gpu.bandwidth * fitted.reached,
            launch=gpu.launch.likely if gpu.launch else fitted.launch,
            l2_cycles=gpu.l2_latency.likely,
            dram_cycles=gpu.dram_latency.likely,
            efficiency=fitted.efficiency,
            serial=fitted.serial,
            latency=fitted.latency,
            trips=gpu.trips.likely,
            arrival=gpu.arrival.likely,
        )

    def microseconds(self, cycles: float) -> float:
        return cycles / self.clock / 1e3


@dataclass(frozen=True, slots=True)
class Parts:
    """Microseconds of one kernel by what they are spent on.

    `bytes`, `issue` and `tensor` overlap: `steady` is what they take together. `tensor` is part of `issue`
    where the tensor cores share a port with other work.
    """

    work: Work
    resident: int
    rounds: float
    launch: float
    first: float
    bytes: float
    issue: float
    tensor: float
    steady: float
    tail: float

    @property
    def total(self) -> float:
        return self.launch + self.first + self.steady + self.tail

    @property
    def limit(self) -> str:
        """The largest part."""
        fixed = {LAUNCH: self.launch, FIRST: self.first, TAIL: self.tail}
        found = {BYTES: self.bytes, ISSUE: self.issue, **fixed}
        return max(found, key=lambda name: found[name])


def parts_of(work: Work, setting: Setting, resident: int | None = None) -> Parts:
    """One kernel in a graph, started when the one before it has ended; `resident` where its blocks have other sizes."""
    gpu = setting.gpu
    resident = resident or resident_blocks(gpu, work.warps * 32, work.registers, work.shared)
    first = setting.microseconds(setting.latency * (setting.l2_cycles + setting.dram_cycles))
    streamed = max(work.bytes / setting.reached, work.cached(gpu.multiprocessors) / gpu.l2_bandwidth) / 1e3
    share = fullest(work, gpu)
    issue = setting.microseconds(share * _busiest(work, gpu) / setting.efficiency)
    blocks = work.live / gpu.multiprocessors
    tensor = {name: port for name, port in gpu.ports.items() if Pipe.TENSOR in port}
    return Parts(
        work=work,
        resident=resident,
        rounds=max(1.0, blocks / resident),
        launch=setting.launch,
        first=first,
        bytes=streamed,
        issue=issue,
        tensor=setting.microseconds(share * max(port_cycles(work, gpu, name) for name in tensor)),
        steady=steady(blocks, resident, streamed, issue, first, setting.serial),
        tail=setting.microseconds(work.last * DEPENDENT_CYCLES + setting.l2_cycles),
    )


def fullest(work: Work, gpu: Gpu) -> float:
    """Work of the multiprocessor with most blocks, over the average: more than 1 where blocks do not divide."""
    each = work.live / gpu.multiprocessors
    return ceil(each) / each


def port_cycles(work: Work, gpu: Gpu, port: str) -> float:
    """Cycles that a scheduler's port is busy on average."""
    total = sum(work.instructions.get(pipe, 0) * cycles for pipe, cycles in gpu.ports[port].items())
    return total / gpu.multiprocessors / gpu.schedulers


def slots(work: Work, gpu: Gpu) -> float:
    """Instructions of a scheduler on average: a cycle each."""
    return work.slots / gpu.multiprocessors / gpu.schedulers


def _busiest(work: Work, gpu: Gpu) -> float:
    return max(slots(work, gpu), *(port_cycles(work, gpu, name) for name in gpu.ports))


def busiest_port(work: Work, gpu: Gpu) -> str:
    """The port that bounds the issue of instructions, or "issue slots"."""
    found = {"issue slots": slots(work, gpu)} | {name: port_cycles(work, gpu, name) for name in gpu.ports}
    return max(found, key=lambda name: found[name])


def roofline(work: Work, setting: Setting) -> Parts:
    """The same bytes with no work on them: what `roofline` rows of a benchmark measure."""
    return parts_of(replace(work, instructions={}, last=0, weights=work.bytes, activations=0.0), setting)


def floor(work: Work, gpu: Gpu) -> float:
    """Microseconds for the bytes alone at the nominal bandwidth: nothing is faster."""
    return work.bytes / gpu.bandwidth / 1e3
