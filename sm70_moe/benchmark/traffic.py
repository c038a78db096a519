"""Bytes that a layer must read of its banks."""

from __future__ import annotations

from dataclasses import dataclass

from sm70_moe.layout import METADATA, OCTET, ORDERS, WORDS, BankLayout, BankShape, Plane
from sm70_moe.timings import BOTH, W2, W13

LOAD = 16
"""Bytes of one load of the read-only kernels."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block reads of one expert: eight columns with all K. Bytes, each a multiple of `LOAD`.

    `tiles` are in one expert's matrix.
    """

    tiles: int
    words: int
    groups: int

    @property
    def loads(self) -> int:
        return (self.words + self.groups) // LOAD


def planes(layout: BankLayout, rows: int, columns: int) -> tuple[Plane, ...]:
    return ORDERS[layout.order].planes(layout.metadata, rows, columns, layout.group)


def expert_bytes(layout: BankLayout, shape: BankShape, part: str = BOTH) -> int:
    """Words and metadata of one expert: W13, W2 or both."""
    return sum(plane.nbytes for name in parts(part) for plane in planes(layout, *matrix(shape, name)))


def bank_bytes(layout: BankLayout, shape: BankShape) -> int:
    """Both banks of a layer."""
    return shape.experts * expert_bytes(layout, shape)


def parts(part: str) -> tuple[str, ...]:
    return (W13, W2) if part == BOTH else (part,)


def matrix(shape: BankShape, part: str) -> tuple[int, int]:
    """K and N of W13 or W2."""
    return (shape.hidden, 2 * shape.intermediate) if part == W13 else (shape.intermediate, shape.hidden)


def tile(layout: BankLayout, shape: BankShape, part: str) -> Tile:
    """A tile of W13 or W2, as the read-only kernels read it.

    Metadata that is no whole number of loads is cut down to one, so that the roofline never reads
    more than a route has to.
    """
    rows, columns = matrix(shape, part)
    found = planes(layout, rows, columns)
    tiles = columns // OCTET
    words = next(plane.nbytes for plane in found if plane.name == WORDS) // tiles
    groups = sum(plane.nbytes for plane in found if plane.name != WORDS) // tiles
    return Tile(tiles, words // LOAD * LOAD, groups // LOAD * LOAD)


def tile_bytes(layout: BankLayout, shape: BankShape, part: str) -> int:
    """What the read-only kernels read of one expert."""
    found = [tile(layout, shape, name) for name in parts(part)]
    return sum(t.tiles * (t.words + t.groups) for t in found)


def stand_in(layout: BankLayout, shape: BankShape, part: str) -> int:
    """Bytes of a plane that the read-only kernels read in place of metadata that lies in two planes; 0 where
    the bank's own will do."""
    if any(plane.name == METADATA for plane in planes(layout, *matrix(shape, part))):
        return 0
    found = tile(layout, shape, part)
    return shape.experts * found.tiles * found.groups


def stand_in_bytes(layout: BankLayout, shape: BankShape) -> int:
    """Both parts of one bank."""
    return sum(stand_in(layout, shape, part) for part in (W13, W2))
