"""One parser for every flag: `0` and `1`, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import SettingsError
from sm70_moe.settings.flags import FlagState, FlagValue, parse_flag, parse_switch

NAME = "VLLM_SM70_AWQ_QWEN38_MOE_COMPACT_GROUPED_DECODE"

REFUSED = [
    "",
    " ",
    " 1",
    "1 ",
    " 1 ",
    "1\n",
    "01",
    "00",
    "1.0",
    "+1",
    "-0",
    "-1",
    "2",
    "0x1",
    "1_",
    "true",
    "True",
    "TRUE",
    "false",
    "False",
    "yes",
    "no",
    "on",
    "off",
    "y",
    "n",
    "t",
    "f",
    "auto",
    "require",
    "none",
    "null",
    "１",  # noqa: RUF001 - a fullwidth digit, which str.isdigit and int() take for a 1
    "٠",  # noqa: RUF001 - an Arabic zero
    "0,1",
    '"1"',
]


def test_one_is_require_and_zero_is_off() -> None:
    """The two texts that a flag may have."""
    assert parse_flag(NAME, "1") is FlagState.REQUIRE
    assert parse_flag(NAME, "0") is FlagState.OFF


def test_a_switch_reads_the_same_two_texts() -> None:
    """The strict-mode switch has no dialect of its own."""
    assert parse_switch("SM70_MOE_STRICT", "1") is True
    assert parse_switch("SM70_MOE_STRICT", "0") is False


@pytest.mark.parametrize("value", REFUSED)
def test_other_texts_are_refused_by_name_value_and_accepted_values(value: str) -> None:
    """Every dialect seen elsewhere is an error that says what it is about."""
    with pytest.raises(SettingsError) as caught:
        parse_flag(NAME, value)
    text = str(caught.value)
    assert NAME in text
    assert repr(value) in text
    assert "0 and 1" in text


@given(st.text())
def test_no_other_text_is_ever_a_state(value: str) -> None:
    """Whatever is not exactly `0` or `1` is refused."""
    if value in ("0", "1"):
        assert parse_flag(NAME, value) in (FlagState.OFF, FlagState.REQUIRE)
    else:
        with pytest.raises(SettingsError):
            parse_flag(NAME, value)


def test_an_explicit_one_differs_from_a_default_that_means_the_same() -> None:
    """The source is part of a flag's value."""
    assert FlagValue(FlagState.OFF, "unset") != FlagValue(FlagState.OFF, f"environment {NAME}")


def test_states_are_their_own_words() -> None:
    """States go into records as plain text."""
    assert [str(state) for state in FlagState] == ["auto", "require", "off"]
