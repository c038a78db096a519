"""How calls of nine tokens and more are cut: tiles of tokens, blocks, parts of H, and the scratch that they take.

Four kernels: the plan sorts the slots by expert and lists the work, the product takes it item by item, once for W13
and once for W2, and the sum adds a token's slots. Grids depend on shapes only: as many blocks as any routing may need,
and those beyond the list leave at once. What a call takes of memory depends on shapes only too, and is bounded: longer
calls are run in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.launch import Step
from sm70_moe.layout import BankShape, Metadata

TILES = (8, 16, 32, 64)
"""Most tokens of an item, for which there are kernels."""

FULL = 0.9
"""A tile is taken if an expert has less than this share of it on average: most experts are one item then."""

ROWS = 32
"""Columns of a matrix that a warp has at a time, rows of the tensor-core product."""

UNITS = 4
"""Units of 32 K in a block of K."""

RESIDENT = {8: 16 << 10, 16: 24 << 10, 32: 48 << 10, 64: 48 << 10}
"""Bytes of shared memory for activations up to which a block keeps all of K, by tile."""

HEAD, ITEM, INDEX, ALIGNED, HALF = 64, 16, 4, 256, 2
"""Bytes of scratch: its head, an item of the list, a slot's number, what parts start at multiples of; an FP16."""

MOST_SLOTS = 2**17
"""Slots of a piece: 8,192 tokens of 16 experts each."""

MOST_PRODUCTS = 512 << 20
"""Bytes of slots' results between W2 and the sum, about: beyond that H is taken in parts (in halves, 8,192 tokens of
the first contract, which take 400 MiB, were 3 % slower)."""

MOST_INNER = 256 << 20
"""Bytes of activations between W13 and W2: longer calls are run in pieces."""

LISTED, STAGED, ROW = 512, 640, 256
"""Bytes of shared memory (batch_product.cuh): lists, for each warp, and a token's row in a buffer."""

CODES, WORDS = 4 * 512, 4 * 128
"""Bytes of a block of weights in a warp's shared memory, from sm_80 on: codes, and each word of metadata."""

KINDS: Mapping[Metadata, int] = MappingProxyType(
    {Metadata.FOUR_BYTE: 4, Metadata.THREE_BYTE: 3, Metadata.TWO_AND_HALF_BYTE: 2}
)
"""What kernels call each kind of metadata (batch_weights.cuh)."""

MANY = 512
"""Blocks of W2 that a device should have at least: about four for each multiprocessor of the largest."""

PLANNED = 4096
"""Slots up to which one block makes the plan; more are sorted by several, in three launches."""

COUNTS, COUNTERS, EACH = 8192, 16, 8
"""Of a block that counts (batch_sort.cu): counts in its shared memory, warps at most, and ids of a lane."""

PLACE_THREADS = 256
SUM_THREADS = 128
CHUNK = 8
"""Columns of a thread of the sum."""


def up(number: int, unit: int) -> int:
    """The least multiple of `unit` from `number` on."""
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens of an item; for each product warps of a block and tiles of a warp; columns of H at a time."""

    tile: int
    warps13: int
    rounds13: int
    warps2: int
    rounds2: int
    columns: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A call's numbers: one rank's sizes, slots of a token, and tokens."""

    shape: BankShape
    top_k: int
    tokens: int

    @classmethod
    def of(cls, case: Case) -> Batch:
        return cls(case.shape, case.top_k, case.tokens)

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    @property
    def inner(self) -> int:
        """Bytes of the activations between W13 and W2."""
        return self.slots * self.shape.intermediate * HALF

    def items(self, tile: int) -> int:
        """Items that any routing gives, at most."""
        experts = min(self.slots, self.shape.experts)
        return experts + (self.slots - experts) // tile

    @property
    def columns(self) -> int:
        """Of H, that W2 and the sum take at a time."""
        parts = -(-self.slots * self.shape.hidden * HALF // MOST_PRODUCTS)
        return min(self.shape.hidden, up(-(-self.shape.hidden // max(1, parts)), ROWS))


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where the parts of scratch start, in bytes: the list of items behind the head, sorted slots, slots' results.

    The list has room for items of the smallest tile, so that a longer call never takes less.
    """

    order: int
    products: int
    size: int

    @classmethod
    def of(cls, batch: Batch, columns: int) -> Scratch:
        order = up(HEAD + batch.items(TILES[0]) * ITEM, ALIGNED)
        products = up(order + batch.slots * INDEX, ALIGNED)  # ranks and counts of the plan stand there first
        return cls(order, products, up(products + batch.slots * columns * HALF, ALIGNED))


def most_tokens(shape: BankShape, top_k: int) -> int:
    """Tokens of a piece."""
    each = max(1, top_k)
    return max(1, min(MOST_SLOTS // each, MOST_INNER // (each * shape.intermediate * HALF)))


def scratch_bytes(shape: BankShape, top_k: int, tokens: int) -> int:
    """Bytes of scratch of a call of up to so many tokens, whatever its routing."""
    batch = Batch(shape, top_k, min(tokens, most_tokens(shape, top_k)))
    parts = MOST_PRODUCTS // HALF + ROWS * batch.slots  # columns are rounded up to whole tiles
    widest = min(batch.slots * shape.hidden, parts)
    return up(Scratch.of(batch, 0).size + widest * HALF, ALIGNED)


def counts(shape: BankShape, top_k: int, first: int) -> tuple[int, ...]:
    """The numbers of tokens, from `first` on, at which other kernels are launched than just before."""
    starts = {PLANNED // top_k + 1, *(ceil(FULL * tile * shape.experts / top_k) for tile in TILES[:-1])}
    return tuple(sorted({first, *(start for start in starts if first < start <= most_tokens(shape, top_k))}))


def cut_of(batch: Batch) -> Cut:
    """What was found best on an H200, by slots of an expert: tuning may choose others."""
    each = batch.slots / batch.shape.experts
    tile = next((tile for tile in TILES if each < FULL * tile), TILES[-1])
    columns = batch.columns
    # a warp has some tiles of W2 one after the other where K is short, if there are blocks enough without
    blocks = up(batch.shape.intermediate // 32, UNITS) // UNITS
    rounds = max(1, min((10 if tile < 32 else 20) // blocks, batch.items(tile) * columns // ROWS // (4 * MANY)))
    return Cut(tile, 2 if tile < 32 else 4, 1, 4, min(rounds, 5 if tile < 32 else 10), columns)


def ring_of(tile: int, architecture: str) -> int:
    """Blocks of K that are on their way or in use: buffers of a block that does not keep all of K."""
    return 3 if tile < 32 and copies(architecture) else 2


def copies(architecture: str) -> bool:
    """Do weights pass through shared memory? From sm_80 on, which copies without waiting."""
    return int(architecture.removeprefix("sm_")) >= 80


def buffers_of(tile: int, units: int, ring: int) -> int:
    """Blocks of K that a block's shared memory holds."""
    blocks = up(units, UNITS) // UNITS
    return blocks if blocks <= ring or blocks * tile * ROW <= RESIDENT[tile] else ring


def steps(case: Case) -> tuple[Step, ...]:
    """The steps of a call of no more tokens than a piece has."""
    return steps_with(case, cut_of(Batch.of(case)))


def steps_with(case: Case, cut: Cut) -> tuple[Step, ...]:
    """The same with a given cut."""
    shape, batch = case.shape, Batch.of(case)
    scratch = Scratch.of(batch, cut.columns)
    whole = {"second": 0, "first_column": 0, "columns": 2 * shape.intermediate}
    made = [*plan(case, cut, scratch), _product(case, cut, scratch, cut.warps13, cut.rounds13, shape.hidden, whole)]
    for first in range(0, shape.hidden, cut.columns):
        columns = min(cut.columns, shape.hidden - first)
        part = {"products_at": scratch.products, "first_column": first, "columns": columns}
        blocks = -(-case.tokens * columns // CHUNK // SUM_THREADS)
        made += [
            _product(case, cut, scratch, cut.warps2, cut.rounds2, shape.intermediate, part | {"second": 1}),
            Step("batch_sum", "batch_sum", grid=(blocks,), values=part, dependent=case.dependent),
        ]
    return tuple(made)


def plan(case: Case, cut: Cut, scratch: Scratch) -> tuple[Step, ...]:
    """Slots sorted by expert, and the list of items. Ranks and counts stand where products will."""
    slots, experts = case.tokens * case.top_k, case.shape.experts
    values = {"tile": cut.tile, "order_at": scratch.order, "ranks_at": scratch.products}
    if slots <= PLANNED:
        return (Step("batch_plan", "batch_plan", grid=(1,), values=values),)
    values["table_at"] = scratch.products + slots * INDEX
    blocks = -(-slots // (min(COUNTERS, COUNTS // experts) * 32 * EACH))
    places = -(-slots // PLACE_THREADS)
    return (
        Step("batch_sort", "batch_count", grid=(blocks,), values=values),
        Step("batch_sort", "batch_list", grid=(1,), values=values, dependent=case.dependent),
        Step("batch_sort", "batch_place", grid=(places,), values=values, dependent=case.dependent),
    )


def _product(
    case: Case, cut: Cut, scratch: Scratch, warps: int, rounds: int, depth: int, part: Mapping[str, int]
) -> Step:
    """One of the products, of `depth` rows; `part` says which of them, and which of its columns."""
    units, parts = depth // 32, -(-part["columns"] // (ROWS * warps * rounds))
    ring = ring_of(cut.tile, case.architecture)
    buffers, kind = buffers_of(cut.tile, units, ring), KINDS[case.layout.metadata]
    each = STAGED + ring * (CODES + WORDS * (1 if kind == 4 else 2)) * copies(case.architecture)
    values = {
        "metadata": kind,
        "order_at": scratch.order,
        "products_at": scratch.products,
        "parts": parts,
        "rounds": rounds,
        "buffers": buffers,
    }
    return Step(
        "batch_product",
        f"batch_product_{cut.tile}",
        grid=(Batch.of(case).items(cut.tile) * parts,),
        axes={"order": case.layout.order, "metadata": "4-byte" if kind == 4 else "compact"},
        threads=32 * warps,
        shared=LISTED + warps * each + buffers * cut.tile * ROW,
        values={**values, **part},
        dependent=case.dependent,
    )
