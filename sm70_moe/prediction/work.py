"""What one kernel of a call asks of a GPU: blocks, bytes, and instructions counted in its machine code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.machinecode.flow import LOOPS, Flow, Role
from sm70_moe.kernels.machinecode.pipes import Pipe
from sm70_moe.layout import Metadata
from sm70_moe.prediction.routing import SERVED, Routing

UNIT = 32
"""K of an octet of columns for which one lane holds 16 bytes."""

OCTET = 8
TENSOR_STEPS: Mapping[str, int] = {"sm_70": 8, "sm_75": 8}
"""Tensor-core instructions for a unit of an octet: an HMMA.884 covers 8 x 4 weights, an HMMA.16816 8 x 32."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel of one call.

    `blocks` are launched, `live` of them have work. `instructions` counts those of all warps, by pipe;
    `last` are those that stand between a block's last barrier and its result. `bytes` are read from
    memory, and `weights` are all that blocks read of them: an expert twice where two tokens' slots or two blocks
    need it. `activations` are what there is to read, and `readers` the blocks that read all of them.
    """

    part: str
    kernel: str
    blocks: int
    live: float
    warps: int
    registers: int
    shared: int
    instructions: Mapping[Pipe, float]
    last: int
    bytes: float
    weights: float
    activations: float
    readers: float

    def cached(self, multiprocessors: int) -> float:
        """Bytes from L2. L1 keeps activations, so a multiprocessor takes them once, however many blocks it has."""
        return self.weights + self.activations * min(self.readers, multiprocessors)

    @property
    def slots(self) -> float:
        """Issue slots of all warps."""
        return sum(self.instructions.values())

    @property
    def per_warp(self) -> float:
        """Instructions of a warp with work, on average."""
        return self.slots / (self.live * self.warps)


@dataclass(frozen=True, slots=True)
class Call:
    """The sizes that a kernel's work follows from."""

    geometry: Geometry
    metadata: Metadata
    tokens: int
    routing: Routing

    @property
    def slots(self) -> int:
        return self.tokens * self.geometry.top_k

    def expert_bytes(self, part: str) -> float:
        """Codes and metadata of one expert's matrix."""
        elements = self.geometry.hidden * self.geometry.intermediate * (2 if part == "w13" else 1)
        return elements / 2 + elements / self.geometry.group * self.metadata.bits_each / 8

    def bytes(self, part: str) -> float:
        """What a perfect kernel reads from memory: every distinct expert once."""
        return self.routing.distinct * self.expert_bytes(part)


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled kernel as it is launched: its flow, its resources, its blocks in x and y."""

    flow: Flow
    architecture: str
    registers: int
    shared: int
    threads: int
    grid: tuple[int, int]

    @property
    def warps(self) -> int:
        return -(-self.threads // 32)


def work_of(call: Call, part: str, image: Image) -> Work:
    """Work of the kernel that runs one of the two products."""
    first = part == "w13"
    blocks = image.grid[0] * image.grid[1]
    live = image.grid[0] * call.routing.groups if first else float(blocks)
    served = SERVED if first else call.tokens / image.grid[1]
    block = per_block(image, items(call, part, served), tensor_steps(call, part, served, image))
    leaving = Counter({pipe: count * image.warps for pipe, count in image.flow.leaving.items()})
    total = {pipe: live * block[pipe] + (blocks - live) * leaving[pipe] for pipe in Pipe}
    return Work(
        part=part,
        kernel=image.flow.kernel,
        blocks=blocks,
        live=live,
        warps=image.warps,
        registers=image.registers,
        shared=image.shared,
        instructions={pipe: count for pipe, count in total.items() if count},
        last=image.flow.counts(Role.LAST).total() + image.flow.counts(Role.STORING).total(),
        bytes=call.bytes(part),
        weights=(call.routing.groups if first else call.slots) * call.expert_bytes(part),
        activations=2.0 * call.tokens * call.geometry.hidden
        if first
        else 2.0 * call.slots * call.geometry.intermediate,
        readers=image.grid[0],
    )


def items(call: Call, part: str, served: float) -> Mapping[Role, float]:
    """How many items the loops of a block share out among its threads, by what they do."""
    if part == "w13":
        return {Role.LAST: 4 * served, Role.STORING: 1, Role.STAGING: served * call.geometry.hidden / 8}
    slots = served * call.geometry.top_k
    return {
        Role.SCALARS: slots,
        Role.STAGING: slots * call.geometry.intermediate / 8,
        Role.SUMMING: slots * OCTET,
        Role.LAST: served * OCTET,
        Role.STORING: served * OCTET,
    }


def tensor_steps(call: Call, part: str, served: float, image: Image) -> float:
    """Tensor-core instructions that a block needs, however they are shared out."""
    each = TENSOR_STEPS.get(image.architecture, 1)
    if part == "w13":
        return call.geometry.hidden / UNIT * each
    return served * call.geometry.top_k * call.geometry.intermediate / UNIT * each


def per_block(image: Image, shared_out: Mapping[Role, float], steps: float) -> Counter[Pipe]:
    """Instructions of a block with work, over its warps, by pipe."""
    total: Counter[Pipe] = Counter()
    for stretch in image.flow.stretches:
        times = _times(image, stretch.role, stretch.entered, shared_out, steps)
        for pipe, count in stretch.counts.items():
            total[pipe] += count * times
    return total


def _times(image: Image, role: Role, entered: bool, shared_out: Mapping[Role, float], steps: float) -> int:
    """How many warps run a stretch, each as often as it does."""
    if role is Role.ALL:
        return image.warps
    if role in (Role.ONE, Role.WAITING):
        return 1
    if role is Role.PRODUCT:
        return image.warps * (1 if entered else _rounds(image, steps))
    needed = -(-int(shared_out.get(role, 32 * image.warps)) // 32)  # an unknown loop: once for each warp
    return min(image.warps, needed) if entered or role not in LOOPS else needed


def _rounds(image: Image, steps: float) -> int:
    """How often a warp runs a loop of products: what is needed less what stands outside of the loop."""
    outside, inside = image.flow.counts(Role.ALL)[Pipe.TENSOR], image.flow.counts(Role.PRODUCT)[Pipe.TENSOR]
    return max(1, -(-round(steps / image.warps - outside) // inside))
