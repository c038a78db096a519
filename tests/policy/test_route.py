from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sm70_moe.policy import Route, TokenRange
from sm70_moe.policy.coverage import uncovered


@pytest.mark.parametrize(
    ("tokens", "first", "last", "text"),
    [
        (1, 1, 1, "1"),
        ([2, 8], 2, 8, "2-8"),
        ([3, 3], 3, 3, "3"),
        ({"from": 128}, 128, None, "128 and more"),
        (None, 1, None, "1 and more"),
    ],
)
def test_every_form_of_a_token_range(tokens: Any, first: int, last: int | None, text: str) -> None:
    """A number, two ends, an open end, and nothing for every token count."""
    given_tokens = {} if tokens is None else {"tokens": tokens}
    found = Route.model_validate({"name": "r", "backend": "legacy"} | given_tokens).tokens
    assert found == TokenRange(first=first, last=last)
    assert str(found) == text


def test_a_range_made_in_code_is_ordered_too() -> None:
    """The model itself refuses what the file may not say."""
    with pytest.raises(ValidationError):
        TokenRange(first=2, last=1)
    with pytest.raises(ValidationError):
        TokenRange(first=0, last=1)


def test_a_route_made_in_code_takes_a_range() -> None:
    """A range needs no form of a file."""
    tokens = TokenRange(first=2, last=None)
    assert Route(name="r", backend="legacy", tokens=tokens).tokens is tokens


@pytest.mark.parametrize(
    ("tokens", "inside"), [(0, False), (1, False), (2, True), (8, True), (9, False), ("2", False), (None, False)]
)
def test_both_ends_are_inside(tokens: Any, inside: bool) -> None:
    """2-8 holds 2 and 8."""
    assert (tokens in TokenRange(first=2, last=8)) is inside


def test_unconditional_means_no_flag_and_no_call() -> None:
    """Either of them makes a route conditional."""
    bare = {"name": "r", "backend": "legacy"}
    call = {"x": "float16", "ids": "int32", "weights": "float32", "contiguous": True, "alignment": 1}
    assert Route.model_validate(bare).unconditional
    assert not Route.model_validate(bare | {"feature": "f"}).unconditional
    assert not Route.model_validate(bare | {"call": call}).unconditional


ends = st.integers(1, 30)
ranges = st.builds(lambda a, b: TokenRange(first=min(a, b or a), last=b and max(a, b)), ends, st.none() | ends)


@given(st.lists(ranges, max_size=5))
def test_uncovered_is_the_complement(covered: list[TokenRange]) -> None:
    """Each token count is in the ranges or in what they leave, never in both or in neither."""
    left = uncovered(covered)
    for tokens in [*range(1, 35), 10**9]:
        assert any(tokens in r for r in covered) != any(tokens in r for r in left)
    assert all(a.last is not None and a.last + 1 < b.first for a, b in pairwise(left))
