"""The grammar of layer lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import SettingsError
from sm70_moe.settings.layerlists import LayerList

NAME = "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_DENYLIST"


@pytest.mark.parametrize(
    ("text", "layers", "canonical"),
    [
        ("0", {0}, "0"),
        ("0-2,5", {0, 1, 2, 5}, "0-2,5"),
        ("0-3,7", {0, 1, 2, 3, 7}, "0-3,7"),
        ("7,0-3", {0, 1, 2, 3, 7}, "0-3,7"),
        ("4-4", {4}, "4"),
        ("1,2,3", {1, 2, 3}, "1-3"),
        ("2-5,3-4,5-6", {2, 3, 4, 5, 6}, "2-6"),
        ("1,1", {1}, "1"),
        ("10,1", {1, 10}, "1,10"),
        ("100000", {100_000}, "100000"),
    ],
)
def test_lists_that_are_accepted(text: str, layers: set[int], canonical: str) -> None:
    """A list holds its ids and no neighbours, and prints in its shortest form."""
    found = LayerList.parse(NAME, text)
    assert {i for i in [*range(20), 99_999, 100_000, 100_001] if i in found} == layers
    assert str(found) == canonical


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("", ""),
        ("7-3", "7-3"),
        ("a", "a"),
        ("1,,2", ""),
        (",1", ""),
        ("1,", ""),
        ("-1", "-1"),
        ("0-", "0-"),
        ("-", "-"),
        ("0--2", "0--2"),
        ("0-2-4", "0-2-4"),
        (" 1", " 1"),
        ("1, 2", " 2"),
        ("1\n", "1\n"),
        ("+1", "+1"),
        ("01", "01"),
        ("1_0", "1_0"),
        ("1.0", "1.0"),
        ("１", "１"),  # noqa: RUF001 - a fullwidth digit
        ("100001", "100001"),
        ("0-100001", "0-100001"),
        ("0-99999999999999999999", "0-99999999999999999999"),
        ("1;2", "1;2"),
    ],
)
def test_lists_that_are_refused(text: str, item: str) -> None:
    """The error names the variable, its whole value and the item."""
    with pytest.raises(SettingsError) as caught:
        LayerList.parse(NAME, text)
    message = str(caught.value)
    assert NAME in message
    assert repr(text) in message
    assert repr(item) in message


def test_every_wrong_item_is_named() -> None:
    """One round is enough to mend a list."""
    with pytest.raises(SettingsError) as caught:
        LayerList.parse(NAME, "1,b,7-3,2")
    assert "'b', '7-3'" in str(caught.value)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_the_canonical_text_reads_back_as_the_same_list(layers: set[int]) -> None:
    """Equal sets of layers are equal lists, whatever order they were written in."""
    found = LayerList.parse(NAME, ",".join(map(str, layers)))
    assert {i for i in range(302) if i in found} == layers
    assert LayerList.parse(NAME, str(found)) == found


def test_an_empty_list_holds_nothing() -> None:
    """The default deny list is empty, false and prints as nothing."""
    assert 0 not in LayerList()
    assert not LayerList()
    assert str(LayerList()) == ""
