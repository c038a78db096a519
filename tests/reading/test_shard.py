"""Cutting a layer over ranks: columns, rows, experts and groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import BackendError
from sm70_moe.facts import LayerFacts
from sm70_moe.layout import BankShape, Metadata
from sm70_moe.reading.shard import Share, covering_groups, source_groups, split

FIRST = LayerFacts(layer="first", hidden=2560, intermediate=640, experts=512, tensor_parallel=4)


def test_the_ranks_of_the_first_contract() -> None:
    """Rank r owns intermediate rows [160 r, 160 (r + 1)) and all experts."""
    shares = [Share.of(replace(FIRST, tensor_rank=rank)) for rank in range(4)]
    assert [share.intermediate for share in shares] == [
        range(160), range(160, 320), range(320, 480), range(480, 640)
    ]  # fmt: skip
    assert shares[3].experts == range(512)
    assert shares[3].shape == BankShape(512, 2560, 160)


def test_three_byte_metadata_saves_what_the_contract_says() -> None:
    """48 layers of the first contract: weights, 4-byte metadata and the 943,718,400 bytes saved."""
    shape = Share.of(FIRST).shape
    four, three = (48 * shape.metadata_bytes(kind, 32) for kind in (Metadata.FOUR_BYTE, Metadata.THREE_BYTE))
    assert 48 * shape.weight_bytes == 15_099_494_400
    assert four == 3_774_873_600
    assert four - three == 943_718_400


def test_expert_parallel_ranks_take_experts_in_order() -> None:
    """Seven experts on three ranks: 3, 2, 2."""
    assert [split(7, 3, rank) for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]


@given(st.integers(0, 600), st.integers(1, 16))
def test_a_split_is_a_partition(count: int, ranks: int) -> None:
    """Every thing goes to exactly one rank, in order, and no rank has two more than another."""
    parts = [split(count, ranks, rank) for rank in range(ranks)]
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, (0, 0, 0, 0, 1)), (1, (1, 1, 1, 2, 2)), (2, (2, 2, 3, 3, 3)), (3, (3, 4, 4, 4, 4))],
)
def test_regrouping_follows_the_ranks_row_offset(rank: int, expected: tuple[int, ...]) -> None:
    """Group 128, 160 rows per rank, prepared groups of 32: floor((160 r + 32 j) / 128)."""
    assert source_groups(160 * rank, 160, 128, 32) == expected


def test_covering_groups_are_those_that_the_rows_touch() -> None:
    """Rows 160 to 319 in groups of 128 touch groups 1 and 2; whole groups touch themselves only."""
    assert covering_groups(160, 160, 128) == range(1, 3)
    assert covering_groups(128, 128, 128) == range(1, 2)


@pytest.mark.parametrize(
    ("offset", "rows", "group", "prepared"), [(0, 160, 128, 64), (0, 160, 32, 64), (80, 160, 128, 32), (0, 160, 128, 0)]
)
def test_groups_that_do_not_fit_are_refused_with_the_numbers(offset: int, rows: int, group: int, prepared: int) -> None:
    """A prepared group may not leave the rows nor reach over a border."""
    with pytest.raises(BackendError) as caught:
        source_groups(offset, rows, group, prepared)
    for number in (offset, rows, group, prepared):
        assert str(number) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel": 3}, "640"),
        ({"tensor_rank": 4}, "4"),
        ({"tensor_rank": -1}, "-1"),
        ({"tensor_parallel": 0}, "0"),
        ({"expert_parallel": 2, "expert_rank": 2}, "2"),
        ({"hidden": None}, "hidden"),
    ],
)
def test_ranks_that_cannot_be_are_refused(changes: dict[str, int | None], named: str) -> None:
    """The layer and the number are told."""
    with pytest.raises(BackendError) as caught:
        Share.of(replace(FIRST, **changes))
    assert "first" in str(caught.value)
    assert named in str(caught.value)
