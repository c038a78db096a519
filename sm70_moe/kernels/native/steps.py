"""Which kernels each native backend launches for a call: the one place where grids are written.

A function per backend takes a `Case` and gives its steps. It runs once for each layer and number of
tokens, never on the hot path. docs/kernels.md names the arguments that every kernel may take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sm70_moe.errors import BackendError
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import FUSED, SOURCES, TUNED, declared
from sm70_moe.kernels.native import batches, octets, tactics
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.launch import Step
from sm70_moe.layout import BankLayout, BankShape, Metadata


@dataclass(frozen=True, slots=True)
class Pieces:
    """How calls of any length are run: in pieces of `most(shape, top_k)` tokens, each with scratch that is lent.

    `scratch(shape, top_k, tokens)` are its bytes, beside the activations between W13 and W2; `counts(shape, top_k,
    first)` the numbers of tokens at which other kernels are launched.
    """

    most: Callable[[BankShape, int], int]
    scratch: Callable[[BankShape, int, int], int]
    counts: Callable[[BankShape, int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Route:
    """How a backend, or an option of one, runs the calls that it `runs`.

    `sources` must all have images for a device before the backend runs on it. `scratch` counts
    resident bytes of a layer, beyond the activations between W13 and W2; a route with `pieces` has calls of any length,
    and what it needs is lent for each. `rounds` are the calls that
    the self-test makes one after the other on the same scratch, where one is not enough. `tactics` are what a call
    of a bucket's largest number of tokens may be run by, the rule first; none where there is nothing to choose.
    """

    steps: Callable[[Case], tuple[Step, ...]]
    runs: Capability
    sources: tuple[str, ...]
    scratch: int = 0
    rounds: Callable[[Case], tuple[tuple[Step, ...], ...]] | None = None
    pieces: Pieces | None = None
    tactics: Callable[[Case], tuple[str, ...]] | None = None

    @classmethod
    def of(cls, name: str, steps: Callable[[Case], tuple[Step, ...]], **more: Any) -> Route:
        """The route of a backend, or of an option, as it is declared."""
        found = declared(name)
        if found is None:
            raise BackendError(f"backend {name!r}: nothing is declared of it")
        return cls(steps, found, SOURCES[name], **more)

    @property
    def first(self) -> int:
        return self.runs.tokens.first

    @property
    def last(self) -> int:
        """The most tokens of a call, where they have an end."""
        assert self.runs.tokens.last is not None
        return self.runs.tokens.last

    def planned(self, shape: BankShape, top_k: int) -> tuple[int, ...]:
        """Numbers of tokens that are planned in advance: all of them, or those at which the kernels change."""
        if self.pieces is not None:
            return self.pieces.counts(shape, top_k, self.first)
        return tuple(range(self.first, self.last + 1))

    def most(self, shape: BankShape, top_k: int) -> int:
        """Tokens of a call at most, or of a piece of one."""
        return self.pieces.most(shape, top_k) if self.pieces else self.last

    def lent(self, shape: BankShape, top_k: int, tokens: int) -> int:
        """Bytes of scratch that a call of so many tokens is lent."""
        return self.pieces.scratch(shape, top_k, tokens) if self.pieces else 0

    @property
    def layouts(self) -> tuple[BankLayout, ...]:
        """Every bank layout that the kernels read, in a fixed order."""
        reads = self.runs.reads
        return tuple(
            BankLayout(order, metadata, group, interleaved, batched)
            for group in sorted(reads.groups or ())
            for order in sorted(reads.orders)
            for metadata in Metadata
            for interleaved in sorted(reads.interleaved)
            for batched in sorted(reads.batched)
            if metadata in reads.metadata
        )


CALL = ("x", "ids", "weights", "out", "intermediate")
"""Arguments that every call gives anew: addresses."""

SCRATCH = "scratch"
"""What kernels write for each other: a layer's own, or lent for a call (`Route.pieces`)."""

PLANES = tuple(f"{bank}_{plane}" for bank in ("w13", "w2") for plane in ("words", "metadata", "scales", "zeros"))
"""Arguments that are addresses of the banks' planes."""


def numbers(case: Case) -> dict[str, float]:
    """Arguments that are sizes."""
    return {
        "tokens": case.tokens,
        "top_k": case.top_k,
        "hidden": case.shape.hidden,
        "inner": case.shape.intermediate,
        "experts": case.shape.experts,
        "group": case.layout.group,
    }


def bank_arguments(planes: Mapping[str, int]) -> dict[str, float]:
    """Addresses of the planes by argument name; 0 for those that the layout does not have."""
    return {name: planes.get(name, 0) for name in PLANES}


OCTET = 8


def decode(case: Case) -> tuple[Step, ...]:
    """W13 and W2 for up to 8 tokens: two launches, no plan between them.

    W13 has a block for each octet of interleaved columns, or for a few of them, and each slot; blocks whose expert an
    earlier slot has leave at once. W2 has a block for each octet of output columns and one token (up to two tokens) or
    four, or for a few octets and one token; `w2_8` is cut for more blocks than fit at once. Both may start before the
    kernel in front ends: they wait for it themselves.
    """
    axes = {"metadata": case.layout.metadata.value, "order": case.layout.order}
    (first, w13), (second, w2) = w13_blocks(case), w2_blocks(case)
    threads, kind = w13_threads(case.shape.hidden), KINDS[case.dtype]
    return (
        Step(f"decode_w13{kind}", first, grid=w13, axes=axes, threads=threads, dependent=case.dependent),
        Step(f"decode_w2{kind}", second, grid=w2, axes=axes, dependent=case.dependent),
    )


KINDS = {"float16": "", "bfloat16": "_bfloat16"}
"""dtype -> ending of the sources' names."""


def w13_blocks(case: Case) -> tuple[str, tuple[int, int]]:
    """Kernel and grid of W13."""
    each = octets.of_w13(sizes_of(case)) if streams(case) else 1
    grid = -(-2 * case.shape.intermediate // OCTET // each), case.tokens * case.top_k
    if each > 1:
        return f"w13_many_{1 if case.tokens == 1 else 8}", grid
    return f"w13_{case.tokens if case.tokens <= 2 else 8}", grid


def w2_blocks(case: Case) -> tuple[str, tuple[int, int]]:
    """Kernel and grid of W2."""
    each, columns = octets.of_w2(sizes_of(case)) if streams(case) else 1, case.shape.hidden // OCTET
    if each > 1:
        return "w2_many", (-(-columns // each), case.tokens)
    most, name = (1, "w2_1") if case.tokens <= 2 else (4, "w2_4" if case.tokens <= 4 else "w2_8")
    return name, (columns, -(-case.tokens // most))


def sizes_of(case: Case) -> octets.Sizes:
    shape = case.shape
    return octets.Sizes(shape.hidden, shape.intermediate, shape.experts, case.top_k, case.tokens)


def streams(case: Case) -> bool:
    """Whether blocks may take several octets: the quad-pair step has no registers for that."""
    return case.architecture not in QUADPAIR and case.layout.order == "octet32"


QUADPAIR = ("sm_70", "sm_75")
"""Architectures whose tensor-core step is m8n8k4 (tensor.cuh)."""


def w13_threads(hidden: int) -> int:
    """A warp for each 512 of K, up to 16. A version for these sizes is bound to as many; the version for any
    sizes takes what it is given (w13.cuh)."""
    return 32 * min(16, -(-hidden // 512))


BARRIER = 128
"""Bytes of scratch for the barrier's word: a line of its own."""

MOST_BLOCKS = 2**16 - 1
"""Arrivals at the barrier have 16 bits (decode_fused.cu)."""


def fused(case: Case) -> tuple[Step, ...]:
    """W13, a barrier of the whole grid and W2 in one launch: a block for each task, or as many as fit at once."""
    return fused_with(case, max(case.top_k * 2 * case.shape.intermediate // OCTET, case.shape.hidden // OCTET))


def fused_with(case: Case, blocks: int) -> tuple[Step, ...]:
    grid, axes = (min(blocks, MOST_BLOCKS),), {"metadata": case.layout.metadata.value}
    return (Step("decode_fused", "fused_1", grid=grid, axes=axes, cooperative=True),)


def fused_rounds(case: Case) -> tuple[tuple[Step, ...], ...]:
    """Two calls in a row, then other numbers of blocks and back: the barrier has to outlive all of that."""
    usual = fused(case)
    return (usual, usual, fused_with(case, 7), usual, fused_with(case, 1), usual)


OPTIONS: Mapping[str, frozenset[str]] = {"qpn": frozenset({FUSED}), "indexed": frozenset({TUNED})}
"""Backend -> options of a policy that it honours; the fused one has a row of its own in `STEPS`."""

STEPS: Mapping[str, Route] = {
    "decode": Route.of("decode", decode),
    "qpn": Route.of("qpn", decode),
    "grouped": Route.of("grouped", decode),
    "indexed": Route.of(
        "indexed",
        tactics.steps,
        pieces=Pieces(batches.most_tokens, batches.scratch_bytes, batches.counts),
        tactics=tactics.offered,
    ),
    FUSED: Route.of(FUSED, fused, scratch=BARRIER, rounds=fused_rounds),
}
"""Backend, or option of one -> how it runs. A native backend without a row has no kernels yet, as admission says."""
