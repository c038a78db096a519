"""What is known about a GPU, each number with its source.

Sources, by the names used below:

- whitepaper: "NVIDIA Tesla V100 GPU Architecture" (2017) and "NVIDIA H100 Tensor Core GPU Architecture" (2022).
- datasheet: V100, V100 PCIe and H200 data sheets.
- guide: CUDA C++ Programming Guide, tables of compute capabilities and of arithmetic throughput.
- volta: Jia, Maggioni, Staiger, Scarpazza, "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking",
  arXiv:1804.06826: latency of L2, and of DRAM with and without a hit of the TLB. As commonly quoted; the paper's own
  tables were not at hand.
- hopper: Luo and others, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", arXiv:2402.13499. Quoted in
  the same way.
- pipes: an NVIDIA engineer on GV100's and GH100's pipes and dispatch ports, forums.developer.nvidia.com,
  threads 108729 (GV100) and 302018 (GH100).
- measured: on one H200 with this package (bench/NOTES.md, docs/evidence.md).
- engines: bandwidth that a mixture-of-experts kernel reached on V100s, 794 GB/s: a figure from the project's brief, not
  checked here; and the usual 830 to 850 of copies.
- assumed: nobody's figure; the range says how little is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sm70_moe.errors import SettingsError
from sm70_moe.kernels.machinecode.pipes import Pipe

Port = Mapping[Pipe, float]
"""Cycles for which an instruction of a pipe keeps a dispatch port of a scheduler."""


@dataclass(frozen=True, slots=True)
class Range:
    """Least, likely and greatest value of a number that is not known exactly."""

    low: float
    likely: float
    high: float


TRIPS = Range(2.5, 3.5, 6.0)
"""Assumed: nobody's measurement. From the last block's results in L2 to the next activations: the arrival half a
trip to one, as nothing comes back; the poll that sees it one to two, since one on its way may just have missed it;
the activations one. The rest is for fences: what L1 holds is given up at each poll, and Volta's are said to be slow."""

ARRIVAL = Range(0.0, 1.0, 2.0)
"""Assumed: L2 takes one atomic addition of a word in a cycle or two; none if the blocks arrive one by one."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Latencies in cycles, bandwidth in GB/s, clock in GHz, launches in microseconds.

    `shared` counts bytes, `registers` words of 4 bytes, both of one multiprocessor, as are `schedulers`, `warps`
    and `blocks`. `l2_bandwidth` is that of reading the cache. `reached` are the GB/s that kernels get out of
    `bandwidth`, and `launch` what one kernel of a graph costs beyond its work; None where the fit gives it.
    A barrier of the whole grid costs `trips` times the way to L2 and back, and `arrival` cycles for each block.
    """

    name: str
    title: str
    architecture: str
    multiprocessors: int
    schedulers: int
    warps: int
    blocks: int
    registers: int
    shared: int
    clock: Range
    bandwidth: float
    l2_bandwidth: float
    reached: Range | None
    launch: Range | None
    l2_latency: Range
    dram_latency: Range
    ports: Mapping[str, Port]
    trips: Range
    arrival: Range


VOLTA_PORTS: Mapping[str, Port] = MappingProxyType(
    {
        # pipes: a warp takes two cycles to be handed to 16 lanes
        "float and multiply": {Pipe.FLOAT: 2, Pipe.MULTIPLY: 2},
        "integer": {Pipe.INTEGER: 2},
        # pipes: FP16 and tensor cores share one dispatch port. guide: 128 FP16 results a cycle are 2 cycles
        # a warp. whitepaper: 64 FMA a cycle and tensor core, two of them a scheduler; an m8n8k4 of four quad
        # pairs is 1,024 FMA in four HMMA.884, so 2 cycles each.
        "half and tensor": {Pipe.HALF: 2, Pipe.TENSOR: 2},
        "memory": {Pipe.MEMORY: 4},  # guide: 32 lanes of loads a cycle and multiprocessor
        "special": {Pipe.SPECIAL: 8},  # guide: 16 results a cycle and multiprocessor
    }
)

HOPPER_PORTS: Mapping[str, Port] = MappingProxyType(
    {
        # pipes, guide: FP32 and FP16 pairs on both halves of the FMA pipe, integer multiply-add on one
        "float and multiply": {Pipe.FLOAT: 1, Pipe.MULTIPLY: 2, Pipe.HALF: 1},
        "integer": {Pipe.INTEGER: 2},
        # whitepaper: 512 FMA a cycle and scheduler, 2,048 in an HMMA.16816; hopper: `mma` gets 0.63 of that
        "tensor": {Pipe.TENSOR: 6.5},
        "memory": {Pipe.MEMORY: 4},
        "special": {Pipe.SPECIAL: 8},
    }
)

LIMITS = {"schedulers": 4, "warps": 64, "blocks": 32, "registers": 65_536}  # guide: the same for 7.0 and 9.0


def _v100(name: str, title: str, clock: Range) -> Gpu:
    return Gpu(
        name=name,
        title=title,
        architecture="sm_70",
        multiprocessors=80,  # whitepaper
        **LIMITS,
        shared=96 * 1024,  # guide
        clock=clock,
        bandwidth=900,  # datasheet
        l2_bandwidth=2155,  # volta
        reached=Range(794, 822, 850),  # engines; the middle is likely
        launch=Range(0.7, 1.2, 2.0),  # assumed; an H200 takes 0.8 (measured), V100's front end is older
        l2_latency=Range(193, 212, 260),  # volta: 193 with a hit; more on the far side of the chip
        # volta: 375 with a hit of the TLB, 1,029 with a miss; banks of many layers are larger than it covers
        dram_latency=Range(375, 600, 1029),
        ports=VOLTA_PORTS,
        trips=TRIPS,
        arrival=ARRIVAL,
    )


# datasheet: boost 1.53 GHz (SXM2) and 1.38 GHz (PCIe); base 1.29 and 1.245 GHz
SXM2 = Range(1.29, 1.50, 1.53)
PCIE = Range(1.245, 1.35, 1.38)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "v100-sxm2-16": _v100("v100-sxm2-16", "V100 SXM2 16 GB", SXM2),
        "v100-sxm2-32": _v100("v100-sxm2-32", "V100 SXM2 32 GB", SXM2),
        "v100-pcie-16": _v100("v100-pcie-16", "V100 PCIe 16 GB", PCIE),
        "v100-pcie-32": _v100("v100-pcie-32", "V100 PCIe 32 GB", PCIE),
        "h200": Gpu(
            name="h200",
            title="H200 SXM",
            architecture="sm_90",
            multiprocessors=132,  # datasheet
            **LIMITS,
            shared=228 * 1024,  # guide
            clock=Range(1.6, 1.83, 1.98),  # datasheet: 1.98 at most; free clocks lie lower under load
            bandwidth=4800,  # datasheet; a copy was measured to reach 4,270
            l2_bandwidth=5500,  # chipsandcheese.com (2023) saw about so much on an H100 PCIe
            reached=None,
            launch=None,
            l2_latency=Range(200, 263, 300),  # hopper (H100)
            dram_latency=Range(480, 660, 1000),  # hopper: 479 on an H100 with hits of the TLB
            ports=HOPPER_PORTS,
            trips=TRIPS,
            arrival=ARRIVAL,
        ),
    }
)
"""The 16 and 32 GB cards differ in memory only: the same prediction."""


def gpu_of(name: str) -> Gpu:
    """Raises SettingsError that lists the names."""
    if name not in GPUS:
        raise SettingsError(f"GPU {name!r}: accepted are {', '.join(GPUS)}")
    return GPUS[name]
