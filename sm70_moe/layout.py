"""How a layer's weights lie in a rank's memory, and how many bytes that takes.

An *order* says where the 4-bit codes of a matrix stand, and which tensors ("planes") hold them and
their scales and zeros. This table has the orders' geometry, which needs no torch;
`weights/orders.py` has what packs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import prod

TILE_COLUMNS = 32
WORD_ROWS = 8
OCTET = 8
BLOCK_ROWS = 32

PLANE_ALIGNMENT = 256
"""Bytes; each plane of a bank starts at a multiple: the start of a memory transaction on every GPU."""

WORDS, METADATA, SCALES, ZEROS = "words", "metadata", "scales", "zeros"
"""Names of planes. A bank has the words and either `metadata` or `scales` and `zeros`."""

ITEM_BYTES = {"int32": 4, "float16": 2, "uint8": 1}


class Metadata(StrEnum):
    """What is kept for each (group, column)."""

    FOUR_BYTE = "4-byte"  # FP16 scale | FP16 bias << 16
    THREE_BYTE = "3-byte"  # FP16 scale, 8-bit zero
    TWO_AND_HALF_BYTE = "2.5-byte"  # FP16 scale, 4-bit zero: exact, zeros are 4-bit numbers

    @property
    def bits_each(self) -> int:
        return {Metadata.FOUR_BYTE: 32, Metadata.THREE_BYTE: 24, Metadata.TWO_AND_HALF_BYTE: 20}[self]


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a bank, as one expert has it; a batched bank has the experts in front."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Order:
    """The geometry of one order: K must be a multiple of `rows`, N of `columns`.

    `tile` are the columns up to a multiple of which a bank is filled. `record` is what the bytes of
    one expert in one plane must be a multiple of. `planes` gives the planes of a matrix for
    (metadata, K, N, group).
    """

    name: str
    rows: int
    columns: int
    tile: int
    record: int
    planes: Callable[[Metadata, int, int, int], tuple[Plane, ...]]

    def names(self, metadata: Metadata) -> frozenset[str]:
        """Names of the planes of a bank."""
        return frozenset(plane.name for plane in self.planes(metadata, self.rows, self.columns, self.rows))

    def fault(self, metadata: Metadata, rows: int, columns: int, group: int) -> str | None:
        """Why a matrix of K = `rows` and N = `columns` has no bank of this order; None if it has."""
        if group < 1 or rows % group or rows % self.rows:
            return f"K = {rows}: accepted are multiples of the group, {group}, and of {self.rows}"
        if columns < 1 or columns % self.columns:
            return f"N = {columns}: accepted are multiples of {self.columns}"
        for plane in self.planes(metadata, rows, columns, group):
            if plane.nbytes % self.record:
                return (
                    f"plane {plane.name!r} has {plane.nbytes} bytes an expert (K = {rows}, N = {columns}, "
                    f"group {group}, {metadata} metadata): accepted are multiples of {self.record}, one load"
                )
        return None


def tile_planes(metadata: Metadata, rows: int, columns: int, group: int) -> tuple[Plane, ...]:
    """ "tile32x8": tiles of 32 columns x 8 rows, filled up with zeros; groups as (K/g, N)."""
    words = Plane(WORDS, "int32", (-(-columns // TILE_COLUMNS), rows // WORD_ROWS, TILE_COLUMNS))
    groups = rows // group
    if metadata is Metadata.FOUR_BYTE:
        return words, Plane(METADATA, "int32", (groups, columns))
    if metadata is Metadata.THREE_BYTE:
        # the reference layout has the three bytes of a column together (CONTRACT 7)
        return words, Plane(METADATA, "uint8", (groups, columns, 3))
    zeros = Plane(ZEROS, "int32", (groups, -(-columns // OCTET)))
    return words, Plane(SCALES, "float16", (groups, columns)), zeros


def octet_planes(metadata: Metadata, rows: int, columns: int, group: int) -> tuple[Plane, ...]:
    """ "octet32": octets of columns, 16 bytes for 32 rows of one column; groups as (N/8, K/g, 8)."""
    octets, groups = columns // OCTET, rows // group
    words = Plane(WORDS, "int32", (octets, rows // BLOCK_ROWS, OCTET, BLOCK_ROWS // WORD_ROWS))
    if metadata is Metadata.FOUR_BYTE:
        return words, Plane(METADATA, "int32", (octets, groups, OCTET))
    scales = Plane(SCALES, "float16", (octets, groups, OCTET))
    if metadata is Metadata.THREE_BYTE:
        return words, scales, Plane(ZEROS, "uint8", (octets, groups, OCTET))
    return words, scales, Plane(ZEROS, "int32", (octets, groups))


TILE32X8 = Order("tile32x8", rows=WORD_ROWS, columns=1, tile=TILE_COLUMNS, record=1, planes=tile_planes)
OCTET32 = Order("octet32", rows=BLOCK_ROWS, columns=OCTET, tile=OCTET, record=16, planes=octet_planes)

ORDERS = {order.name: order for order in (TILE32X8, OCTET32)}
"""Every order that this package can prepare."""


@dataclass(frozen=True, slots=True)
class BankLayout:
    """The tag of a prepared bank; two banks with equal tags are read the same way.

    `interleaved`: columns 2c and 2c + 1 of W13 are gate c and up c; else all gates come first.
    `batched`: all experts of the layer stand in one tensor.
    """

    order: str
    metadata: Metadata
    group: int
    interleaved: bool
    batched: bool

    @property
    def tag(self) -> str:
        columns = "interleaved" if self.interleaved else "gate-up"
        experts = "batched" if self.batched else "per-expert"
        return f"{self.order}/{self.metadata}/group-{self.group}/{columns}/{experts}"


@dataclass(frozen=True, slots=True)
class BankShape:
    """Sizes of one rank's two banks: W13 is (hidden, 2 * intermediate), W2 (intermediate, hidden).

    `intermediate` is per rank, `experts` counts those of this rank.
    """

    experts: int
    hidden: int
    intermediate: int

    @property
    def elements(self) -> int:
        """Weights of all experts together."""
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of the 4-bit codes."""
        return self.elements // 2

    def metadata_bytes(self, metadata: Metadata, group: int) -> int:
        """Bytes of scales and zeros for groups of `group` rows."""
        return self.elements // group * metadata.bits_each // 8

    def bank_bytes(self, layout: BankLayout) -> tuple[int, int]:
        """Bytes of the codes and of scales and zeros in banks of this layout, filled up to whole tiles.

        An order that is not ours is taken to fill nothing up.
        """
        order = ORDERS.get(layout.order)
        if order is None:
            return self.weight_bytes, self.metadata_bytes(layout.metadata, layout.group)
        words = rest = 0
        for rows, columns in ((self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)):
            for plane in order.planes(layout.metadata, rows, columns, layout.group):
                words += plane.nbytes if plane.name == WORDS else 0
                rest += 0 if plane.name == WORDS else plane.nbytes
        return self.experts * words, self.experts * rest
