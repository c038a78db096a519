"""Bytes, against the table that was worked out by hand."""

from __future__ import annotations

import pytest

from sm70_moe.benchmark.traffic import bank_bytes, expert_bytes, stand_in_bytes, tile, tile_bytes
from sm70_moe.layout import BankLayout, BankShape, Metadata

FIRST = BankShape(experts=512, hidden=2560, intermediate=160)


def layout(metadata: str) -> BankLayout:
    return BankLayout("octet32", Metadata(metadata), 32, True, True)


@pytest.mark.parametrize(
    ("metadata", "w13", "w2"),
    [("4-byte", 512_000, 256_000), ("3-byte", 486_400, 243_200), ("2.5-byte", 473_600, 236_800)],
)
def test_bytes_of_an_expert(metadata: str, w13: int, w2: int) -> None:
    """7.680, 7.296 and 7.104 MB for the ten experts of one token."""
    own = layout(metadata)
    assert (expert_bytes(own, FIRST, "w13"), expert_bytes(own, FIRST, "w2")) == (w13, w2)
    assert 10 * expert_bytes(own, FIRST) == {"4-byte": 7_680_000, "3-byte": 7_296_000, "2.5-byte": 7_104_000}[metadata]
    assert bank_bytes(own, FIRST) == 512 * (w13 + w2)


def test_a_bank_of_the_first_contract() -> None:
    """393 MB, as often said."""
    assert bank_bytes(layout("4-byte"), FIRST) == 393_216_000


@pytest.mark.parametrize(
    ("metadata", "w13", "w2"),
    [
        ("4-byte", (40, 10_240, 2_560), (320, 640, 160)),
        ("3-byte", (40, 10_240, 1_920), (320, 640, 112)),
        ("2.5-byte", (40, 10_240, 1_600), (320, 640, 96)),
    ],
)
def test_tiles(metadata: str, w13: tuple, w2: tuple) -> None:
    """Tiles, bytes of words and of metadata; W2's compact metadata is cut down to whole loads of 16 bytes."""
    one, other = tile(layout(metadata), FIRST, "w13"), tile(layout(metadata), FIRST, "w2")
    assert (one.tiles, one.words, one.groups) == w13
    assert (other.tiles, other.words, other.groups) == w2


@pytest.mark.parametrize("metadata", ["4-byte", "3-byte", "2.5-byte"])
def test_the_roofline_reads_no_more_than_a_route(metadata: str) -> None:
    """And at most one percent less: a ratio to it never flatters."""
    read, needed = tile_bytes(layout(metadata), FIRST, "both"), expert_bytes(layout(metadata), FIRST)
    assert 0.99 * needed <= read <= needed


def test_stand_ins() -> None:
    """Only metadata in two planes needs another plane to read."""
    assert stand_in_bytes(layout("4-byte"), FIRST) == 0
    assert stand_in_bytes(layout("3-byte"), FIRST) == 512 * (40 * 1_920 + 320 * 112)
