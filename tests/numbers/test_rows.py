"""Row words of one matrix and of several experts: what is stacked, taken out and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sm70_moe.errors import BackendError
from sm70_moe.numbers.codes import Codes, ExpertCodes
from sm70_moe.numbers.rows import ExpertRows, Rows


def codes(seed: int, rows: int = 64, columns: int = 8) -> Codes:
    source = torch.Generator().manual_seed(seed)
    return Codes(
        torch.randint(0, 16, (rows, columns), generator=source, dtype=torch.uint8),
        torch.randint(0, 16, (rows // 32, columns), generator=source, dtype=torch.uint8),
        torch.rand(rows // 32, columns, generator=source).half(),
    )


def same(one: Rows, other: Rows) -> bool:
    pairs = ((one.words, other.words), (one.zeros, other.zeros), (one.scales, other.scales))
    return all(torch.equal(*pair) for pair in pairs)


def expert(seed: int) -> ExpertRows:
    return ExpertRows.of(ExpertCodes(codes(seed), codes(seed + 1), codes(seed + 2, 32, 16)))


def test_experts_are_stacked_and_taken_out_again() -> None:
    """Each of the three matrices, each of their tensors; a single one in front of nothing is a view."""
    several = [expert(seed) for seed in (0, 10, 20)]
    stacked = ExpertRows.stacked(several)
    assert stacked.down.words.shape == (3, 4, 16)
    for place, one in enumerate(several):
        found = stacked.of_expert(place)
        assert same(found.gate, one.gate)
        assert same(found.up, one.up)
        assert same(found.down, one.down)
    alone = several[1].down.alone
    assert same(alone.of_expert(0), several[1].down)
    assert alone.words.data_ptr() == several[1].down.words.data_ptr()


def test_what_fits_is_accepted() -> None:
    """With and without experts in front."""
    one = Rows.of(codes(0))
    one.require("x", 64, 8, 32)
    one.alone.require("x", 64, 8, 32, (1,))


WRONG = [
    ("words", lambda t: t.long(), "int64"),
    ("words", lambda t: t[:4], "[4, 8]"),
    ("zeros", lambda t: t.int(), "int32"),
    ("zeros", lambda t: t[:, :4], "[2, 4]"),
    ("scales", lambda t: t.bfloat16(), "bfloat16"),
    ("scales", lambda t: t[:1], "[1, 8]"),
]


@pytest.mark.parametrize(("kind", "change", "found"), WRONG)
def test_one_wrong_thing_is_enough(kind: str, change, found: str) -> None:
    """A dtype or a shape of one tensor, each named with what it is."""
    rows = Rows.of(codes(0))
    broken = replace(rows, **{kind: change(getattr(rows, kind))})
    with pytest.raises(BackendError) as caught:
        broken.require("expert 7 up", 64, 8, 32)
    assert str(caught.value).startswith(f"expert 7 up: {kind} are ")
    assert found in str(caught.value)
    accepted = {"words": "torch.int32 [8, 8]", "zeros": "torch.uint8 [2, 8]", "scales": "torch.float16 [2, 8]"}
    assert str(caught.value).endswith(f"accepted is {accepted[kind]}")
