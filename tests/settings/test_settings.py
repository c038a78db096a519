"""Settings: values, sources, conflicts, and that everything wrong is told at once."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import SettingsError
from sm70_moe.settings import settings as module
from sm70_moe.settings.flags import FlagState, FlagValue
from sm70_moe.settings.layerlists import LayerList
from sm70_moe.settings.settings import Change, Settings
from sm70_moe.settings.variables import FLAGS, SETTINGS, Notice, NoticeKind, Retired

QPN = "VLLM_SM70_AWQ_QWEN38_QPN_M1"
GROUPED = "VLLM_SM70_AWQ_QWEN38_MOE_COMPACT_GROUPED_DECODE"
DENY = "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_DENYLIST"
TOKENS = "VLLM_SM70_AWQ_MOE_PERSISTENT_MAX_TOKENS"

AUTO, REQUIRE, OFF = FlagState.AUTO, FlagState.REQUIRE, FlagState.OFF


@dataclass(frozen=True)
class Feature:
    """A policy's feature, as far as settings look at it."""

    env: tuple[str, ...] = ()
    unset: str = "auto"


@dataclass(frozen=True)
class Policy:
    """A policy, as far as settings look at it."""

    features: Mapping[str, Feature] = field(default_factory=dict)


POLICY = Policy(
    {
        "qpn_m1": Feature((QPN,)),
        "grouped_decode": Feature((GROUPED,)),
        "tune_small_shapes": Feature(("VLLM_SM70_AWQ_TUNE_SMALL_SHAPES",), "off"),
        "special": Feature(("VLLM_SM70_SPECIAL", "VLLM_SM70_SPECIAL_OLD")),
    }
)


def refusal(*args: Any, **kwargs: Any) -> str:
    """The text of the SettingsError that these arguments of `from_env` raise."""
    with pytest.raises(SettingsError) as caught:
        Settings.from_env(*args, **kwargs)
    return str(caught.value)


# values and sources


def test_defaults_with_nothing_given() -> None:
    """An empty environment gives the documented defaults, and says that they are defaults."""
    settings = Settings.from_env({})
    assert settings.policy is None
    assert settings.journal is None
    assert settings.strict is False
    assert settings.layer_allow is None
    assert settings.layer_deny == LayerList()
    assert settings.persistent_tokens == 0
    assert settings.variables == {}
    assert settings.sources == dict.fromkeys((row.setting for row in SETTINGS), "default")


@pytest.mark.parametrize(
    ("name", "text", "setting", "value"),
    [
        ("SM70_MOE_POLICY", "generic-awq", "policy", "generic-awq"),
        ("SM70_MOE_POLICY", "./my policy.toml", "policy", "./my policy.toml"),
        ("SM70_MOE_JOURNAL", "/var/log/j.jsonl", "journal", Path("/var/log/j.jsonl")),
        ("SM70_MOE_STRICT", "1", "strict", True),
        ("SM70_MOE_STRICT", "0", "strict", False),
        ("SM70_MOE_LAYER_ALLOWLIST", "0-2,5", "layer_allow", LayerList(((0, 2), (5, 5)))),
        ("VLLM_SM70_AWQ_MOE_BATCHED_LAYER_ALLOWLIST", "3", "layer_allow", LayerList(((3, 3),))),
        ("SM70_MOE_LAYER_DENYLIST", "7", "layer_deny", LayerList(((7, 7),))),
        (DENY, "0-3,7", "layer_deny", LayerList(((0, 3), (7, 7)))),
        ("SM70_MOE_PERSISTENT_MAX_TOKENS", "16", "persistent_tokens", 16),
        (TOKENS, "0", "persistent_tokens", 0),
        (TOKENS, "32", "persistent_tokens", 32),
        (TOKENS, "1", "persistent_tokens", 1),
    ],
)
def test_each_variable_sets_its_field(name: str, text: str, setting: str, value: object) -> None:
    """Every documented name is read, and is the source of its field."""
    settings = Settings.from_env({name: text})
    assert getattr(settings, setting) == value
    assert settings.sources[setting] == f"environment {name}"
    assert settings.variables == {name: text}


@pytest.mark.parametrize(
    ("text", "place"), [("0", False), ("1", True), ("k", Path("k")), ("01", Path("01")), ("/a/1", Path("/a/1"))]
)
def test_a_place_for_compiled_kernels_is_nowhere_the_usual_one_or_a_folder(text: str, place: Path | bool) -> None:
    """`0`, `1` or a path, which is that of the moment."""
    settings = Settings.from_env({"SM70_MOE_KERNEL_CACHE": text})
    assert settings.kernel_cache == (place if isinstance(place, bool) else place.absolute())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SM70_MOE_POLICY", ""),
        ("SM70_MOE_KERNEL_CACHE", " "),
        ("SM70_MOE_POLICY", "  "),
        ("SM70_MOE_JOURNAL", ""),
        ("SM70_MOE_STRICT", ""),
        ("SM70_MOE_STRICT", "true"),
        ("SM70_MOE_STRICT", "01"),
        ("SM70_MOE_LAYER_ALLOWLIST", ""),
        ("SM70_MOE_LAYER_ALLOWLIST", "7-3"),
        ("SM70_MOE_LAYER_DENYLIST", "a"),
        (DENY, "1,,2"),
        (DENY, "-1"),
        (TOKENS, ""),
        (TOKENS, "-1"),
        (TOKENS, "+1"),
        (TOKENS, " 1"),
        (TOKENS, "1 "),
        (TOKENS, "01"),
        (TOKENS, "1_0"),
        (TOKENS, "1.0"),
        (TOKENS, "1e3"),
        (TOKENS, "0x10"),
        (TOKENS, "１"),  # noqa: RUF001 - a fullwidth digit, which int() would take
        (TOKENS, "33"),
        (TOKENS, "64"),
        (TOKENS, "100"),
        ("SM70_MOE_PERSISTENT_MAX_TOKENS", "64"),
        (TOKENS, "9" * 5000),
    ],
)
def test_values_that_are_refused(name: str, text: str) -> None:
    """A malformed setting is an error of our own kind that names variable and value."""
    message = refusal({name: text})
    assert f"{name}={text!r}" in message


@given(st.text())
def test_a_number_is_plain_digits_or_refused(text: str) -> None:
    """No text that int() takes and a reader would not is a number of tokens."""
    plain = text.isascii() and text.isdecimal() and str(int(text)) == text and len(text) < 3 and int(text) <= 32
    if plain:
        assert Settings.from_env({TOKENS: text}).persistent_tokens == int(text)
    else:
        with pytest.raises(SettingsError):
            Settings.from_env({TOKENS: text})


@given(st.text().filter(lambda text: text not in ("0", "1")))
def test_no_text_but_zero_and_one_sets_a_flag(text: str) -> None:
    """Strict parsing happens when settings are made, not when a flag is first used."""
    with pytest.raises(SettingsError):
        Settings.from_env({QPN: text})


@pytest.mark.parametrize("name", [name for row in FLAGS for name in row.names])
def test_every_known_flag_is_parsed_at_once(name: str) -> None:
    """No flag waits for a policy to be found malformed."""
    assert f"{name}='False'" in refusal({name: "False"})


# precedence


def test_argument_before_environment_before_file_before_default(tmp_path: Path) -> None:
    """The four places, in order, each with its own source."""
    path = tmp_path / "settings.env"
    path.write_text("SM70_MOE_POLICY=file\nSM70_MOE_JOURNAL=file\nSM70_MOE_LAYER_DENYLIST=1\n")
    environment = {"SM70_MOE_POLICY": "environment", "SM70_MOE_JOURNAL": "environment"}
    settings = Settings.from_env(environment, env_file=path, policy="argument")
    assert settings.policy == "argument"
    assert settings.journal == Path.cwd() / "environment"
    assert settings.layer_deny == LayerList(((1, 1),))
    assert settings.strict is False
    assert settings.sources == dict.fromkeys((row.setting for row in SETTINGS), "default") | {
        "policy": "argument",
        "journal": "environment SM70_MOE_JOURNAL",
        "layer_deny": f".env file {path}: SM70_MOE_LAYER_DENYLIST",
    }


def test_an_argument_may_be_text_or_typed() -> None:
    """A command line hands over text, a program hands over values."""
    text = Settings.from_env({}, strict="1", layer_deny="0-1", persistent_tokens="8", journal="j")
    typed = Settings.from_env({}, strict=True, layer_deny=LayerList(((0, 1),)), persistent_tokens=8, journal=Path("j"))
    assert text == typed
    assert text.digest == typed.digest


def test_an_argument_of_none_was_not_given() -> None:
    """An option that the command line leaves out does not hide the environment."""
    settings = Settings.from_env({"SM70_MOE_POLICY": "generic-awq"}, policy=None)
    assert settings.policy == "generic-awq"
    assert settings.sources["policy"] == "environment SM70_MOE_POLICY"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict", 1),
        ("strict", "yes"),
        ("persistent_tokens", True),
        ("persistent_tokens", -1),
        ("persistent_tokens", 33),
        ("persistent_tokens", "64"),
        ("persistent_tokens", 1.0),
        ("persistent_tokens", "01"),
        ("layer_allow", [1, 2]),
        ("layer_deny", "7-3"),
        ("policy", 7),
        ("journal", ""),
        ("no_such_setting", "1"),
    ],
)
def test_arguments_are_as_strict_as_variables(name: str, value: object) -> None:
    """A wrong argument raises the same exception type, with its name and value."""
    message = refusal({}, **{name: value})
    assert name in message
    assert repr(value) in message


# two names of one setting


def test_two_names_with_one_value_agree() -> None:
    """Setting both names alike is no conflict."""
    settings = Settings.from_env({"SM70_MOE_LAYER_DENYLIST": "3", DENY: "3", QPN: "1", "SM70_MOE_QPN_M1": "1"})
    assert settings.layer_deny == LayerList(((3, 3),))
    assert settings.flag("qpn_m1", [QPN], AUTO) == FlagValue(REQUIRE, f"environment {QPN}")


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [
        (DENY, "SM70_MOE_LAYER_DENYLIST", ("1", "2")),
        (TOKENS, "SM70_MOE_PERSISTENT_MAX_TOKENS", ("0", "8")),
        (QPN, "SM70_MOE_QPN_M1", ("1", "0")),
        (GROUPED, "SM70_MOE_GROUPED_DECODE", ("0", "1")),
    ],
)
def test_two_names_with_two_values_are_a_conflict(first: str, second: str, values: tuple[str, str]) -> None:
    """The error names both variables and both values."""
    message = refusal({first: values[0], second: values[1]})
    assert f"{first}={values[0]!r}" in message
    assert f"{second}={values[1]!r}" in message


def test_the_environment_settles_what_the_file_says_otherwise(tmp_path: Path) -> None:
    """Places have an order, so another name in the file is overridden, not in conflict."""
    path = tmp_path / ".env"
    path.write_text("SM70_MOE_QPN_M1=0\nSM70_MOE_LAYER_DENYLIST=9\n")
    settings = Settings.from_env({QPN: "1", DENY: "3"}, env_file=path)
    assert settings.flag("qpn_m1", [QPN], AUTO) == FlagValue(REQUIRE, f"environment {QPN}")
    assert settings.layer_deny == LayerList(((3, 3),))


def test_two_names_in_one_file_conflict(tmp_path: Path) -> None:
    """The file has the same rule as the environment."""
    path = tmp_path / ".env"
    path.write_text(f"SM70_MOE_QPN_M1=0\n{QPN}=1\n")
    message = refusal({}, env_file=path)
    assert "SM70_MOE_QPN_M1='0'" in message
    assert f"{QPN}='1'" in message


# everything at once


def test_all_problems_come_in_one_error() -> None:
    """Nobody mends one variable only to meet the next one."""
    message = refusal(
        {
            "SM70_MOE_STRICT": "yes",
            "SM70_MOE_LAYER_ALLOWLIST": "7-3",
            DENY: "1",
            "SM70_MOE_LAYER_DENYLIST": "2",
            TOKENS: "many",
            QPN: "true",
            "SM70_MOE_BATCHED_BANKS": "",
        },
        flags={"qpn_m1": "on", "grouped_decode": "1"},
        journal="",
        unheard_of=3,
    )
    first = [line.partition("=")[0] for line in message.splitlines()]
    assert sorted(first) == sorted(
        [
            "SM70_MOE_STRICT",
            "SM70_MOE_LAYER_ALLOWLIST",
            "SM70_MOE_LAYER_DENYLIST",
            TOKENS,
            QPN,
            "SM70_MOE_BATCHED_BANKS",
            "argument qpn_m1",
            "argument journal",
            "argument unheard_of",
        ]
    )


def test_all_flags_among_the_arguments_that_are_wrong_have_a_line_each() -> None:
    """And a place inside a value is told by its path."""
    message = refusal({}, flags={"qpn_m1": "on", "grouped_decode": "2"})
    assert [line.partition("=")[0] for line in message.splitlines()] == ["argument grouped_decode", "argument qpn_m1"]
    with pytest.raises(SettingsError) as caught:
        Settings(flag_arguments=(("qpn_m1", 1),))
    assert str(caught.value).startswith("argument flag_arguments.0.1=1: ")


# .env files


def test_an_env_file_is_read_as_such_files_are_written(tmp_path: Path) -> None:
    """Comments, `export`, quotes and other programs' names; no `${...}` expansion."""
    path = tmp_path / ".env"
    path.write_text(
        "# a comment\nexport SM70_MOE_STRICT=1\nSM70_MOE_JOURNAL='a b'\n"
        "PASSWORD=secret\nSM70_MOE_POLICY=${HOME}\n\nJUST_A_NAME\n"
    )
    settings = Settings.from_env({}, env_file=path)
    assert settings.strict is True
    assert settings.journal == Path.cwd() / "a b"
    assert settings.policy == "${HOME}"
    assert "PASSWORD" not in settings.variables


def test_lines_of_an_env_file_end_as_on_any_system(tmp_path: Path) -> None:
    """A value over two lines has one line end between them, whatever wrote the file."""
    path = tmp_path / ".env"
    path.write_bytes(b"SM70_MOE_STRICT=1\r\nSM70_MOE_POLICY='a\r\nb'\r\n")
    settings = Settings.from_env({}, env_file=path)
    assert (settings.strict, settings.policy) == (True, "a\nb")


def test_a_missing_env_file_is_an_error(tmp_path: Path) -> None:
    """A path that was asked for is never skipped."""
    assert "nowhere.env" in refusal({}, env_file=tmp_path / "nowhere.env")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"A=1\nSM70_MOE_STRICT\n", "line 2"),
        (b"SM70_MOE_STRICT 1\n", "line 1"),
        (b"A=1\nB=2\nSM70_MOE_POLICY='unclosed\n", "line 3"),
    ],
)
def test_a_malformed_line_is_named_by_number(tmp_path: Path, content: bytes, line: str) -> None:
    """A line that cannot be read is not skipped, and its text is not repeated."""
    path = tmp_path / ".env"
    path.write_bytes(content)
    message = refusal({}, env_file=path)
    assert line in message
    assert "unclosed" not in message


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and a folder in place of a file."""
    path = tmp_path / ".env"
    path.write_bytes(b"SM70_MOE_POLICY=\xff\xfe\n")
    assert str(path) in refusal({}, env_file=path)
    assert str(tmp_path) in refusal({}, env_file=tmp_path)


def test_a_byte_order_mark_in_front_of_an_env_file_is_an_error(tmp_path: Path) -> None:
    """It would hide the first variable of the file."""
    path = tmp_path / ".env"
    path.write_bytes(b"\xef\xbb\xbfSM70_MOE_STRICT=1\n")
    assert "byte order mark (BOM) of UTF-8" in refusal({}, env_file=path)


def test_relative_paths_are_those_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes elsewhere later keeps the places that were meant; arguments as well as variables."""
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_env({"SM70_MOE_JOURNAL": "j.jsonl", "SM70_MOE_CACHE": "c"}, kernels=Path("k"))
    monkeypatch.chdir("/")
    assert (settings.journal, settings.cache) == (tmp_path / "j.jsonl", tmp_path / "c")
    assert settings.kernels == tmp_path / "k"


def test_more_tokens_than_are_served_name_what_is_accepted() -> None:
    """Both spellings, and an argument: name, value, and 0 (derive) or 1 to 32."""
    for name in (TOKENS, "SM70_MOE_PERSISTENT_MAX_TOKENS"):
        message = refusal({name: "64"})
        assert message == f"{name}='64': accepted is 0 (derive), or a whole number from 1 to 32"
    assert "persistent_tokens='64'" in refusal({}, persistent_tokens="64")


def test_a_flag_from_a_file_is_strict_and_says_so(tmp_path: Path) -> None:
    """The file's values go through the same parser, and keep their place."""
    path = tmp_path / ".env"
    path.write_text(f"{QPN}=0\n")
    settings = Settings.from_env({}, env_file=path)
    assert settings.flag("qpn_m1", [QPN], AUTO) == FlagValue(OFF, f".env file {path}: {QPN}")
    path.write_text(f"{QPN}=no\n")
    assert f"{QPN}='no'" in refusal({}, env_file=path)


# flags


@pytest.mark.parametrize(
    ("environment", "argument", "unset", "expected"),
    [
        ({}, None, AUTO, FlagValue(AUTO, "unset")),
        ({}, None, OFF, FlagValue(OFF, "unset")),
        ({QPN: "1"}, None, AUTO, FlagValue(REQUIRE, f"environment {QPN}")),
        ({QPN: "0"}, None, AUTO, FlagValue(OFF, f"environment {QPN}")),
        ({QPN: "1"}, None, OFF, FlagValue(REQUIRE, f"environment {QPN}")),
        ({QPN: "0"}, None, OFF, FlagValue(OFF, f"environment {QPN}")),
        ({"SM70_MOE_QPN_M1": "1"}, None, AUTO, FlagValue(REQUIRE, "environment SM70_MOE_QPN_M1")),
        ({"SM70_MOE_QPN_M1": "0"}, None, AUTO, FlagValue(OFF, "environment SM70_MOE_QPN_M1")),
        ({}, "1", AUTO, FlagValue(REQUIRE, "argument")),
        ({}, "0", AUTO, FlagValue(OFF, "argument")),
        ({}, "1", OFF, FlagValue(REQUIRE, "argument")),
        ({QPN: "1"}, "0", AUTO, FlagValue(OFF, "argument")),
        ({QPN: "0"}, "1", AUTO, FlagValue(REQUIRE, "argument")),
    ],
)
def test_the_state_of_a_flag(
    environment: dict[str, str], argument: str | None, unset: FlagState, expected: FlagValue
) -> None:
    """The three states, from each place."""
    arguments = {} if argument is None else {"qpn_m1": argument}
    assert Settings.from_env(environment, flags=arguments).flag("qpn_m1", [QPN], unset) == expected


def test_the_flags_of_a_policy() -> None:
    """Every feature gets a value, also those that no table knows."""
    settings = Settings.from_env({QPN: "1", "SM70_MOE_SPECIAL": "0"}, flags={"grouped_decode": "0"})
    assert settings.flags(POLICY) == {
        "qpn_m1": FlagValue(REQUIRE, f"environment {QPN}"),
        "grouped_decode": FlagValue(OFF, "argument"),
        "tune_small_shapes": FlagValue(OFF, "unset"),
        "special": FlagValue(OFF, "environment SM70_MOE_SPECIAL"),
    }


def test_all_flags_of_a_policy_that_are_wrong_are_named_at_once() -> None:
    """Flags that only the policy knows are parsed as strictly, all in one error."""
    policy = Policy({"one": Feature(("VLLM_SM70_ONE",)), "two": Feature(("VLLM_SM70_TWO",)), "three": Feature()})
    settings = Settings.from_env(
        {"VLLM_SM70_ONE": "yes", "VLLM_SM70_TWO": "1", "SM70_MOE_TWO": "0", "SM70_MOE_THREE": ""}
    )
    with pytest.raises(SettingsError) as caught:
        settings.flags(policy)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "VLLM_SM70_ONE='yes'" in lines[0]
    assert "VLLM_SM70_TWO='1'" in lines[1]
    assert "SM70_MOE_TWO='0'" in lines[1]
    assert "SM70_MOE_THREE=''" in lines[2]


# unknown names

SERVICE = {"SM70_MOE_SERVICE_HOST": "10.0.0.1", "SM70_MOE_PORT_80_TCP": "tcp://10.0.0.1:80"}


def test_names_that_nobody_knows_are_reported() -> None:
    """Misspelt, unheard-of and container names; known and policy names are not."""
    environment = {"SM70_MOE_STRIKT": "1", "SM70_MOE_SPECIAL": "1", "VLLM_SM70_SPECIAL": "1", QPN: "1", "PATH": "x"}
    assert Settings.from_env(environment | SERVICE).notices([POLICY]) == (
        Notice(NoticeKind.UNKNOWN, ("SM70_MOE_STRIKT",), "SM70_MOE_STRICT"),
        Notice(NoticeKind.CONTAINER, ("SM70_MOE_PORT_80_TCP", "SM70_MOE_SERVICE_HOST")),
    )


def test_a_policy_makes_its_names_known() -> None:
    """Without the policy, its flag has no effect and is reported; an alias elsewhere may be the engine's own."""
    settings = Settings.from_env({"VLLM_SM70_SPECIAL": "1", "SM70_MOE_SPECIAL": "1"})
    assert [notice.name for notice in settings.notices([])] == ["SM70_MOE_SPECIAL"]
    assert settings.notices([POLICY]) == ()
    assert settings.notices([POLICY, Policy()]) == ()


def test_a_name_in_the_wrong_case_is_reported() -> None:
    """Variables have one spelling; another one does nothing, and that is said."""
    settings = Settings.from_env({"sm70_moe_strict": "1"})
    assert settings.strict is False
    assert settings.notices([]) == (Notice(NoticeKind.UNKNOWN, ("sm70_moe_strict",), "SM70_MOE_STRICT"),)


def test_a_flag_argument_that_no_policy_has_is_reported() -> None:
    """A misspelt argument has no more effect than a misspelt variable."""
    settings = Settings.from_env({}, flags={"qpn_m2": "1", "special": "1", "qpn_m1": "1"})
    assert settings.notices([POLICY]) == (Notice(NoticeKind.UNKNOWN, ("argument qpn_m2",), "qpn_m1"),)
    assert settings.notices([POLICY, Policy()]) == settings.notices([POLICY])


def test_everything_that_nobody_knows_is_reported_together() -> None:
    """Variables and several arguments; strict mode gives each a line."""
    settings = Settings.from_env({"SM70_MOE_STRIKT": "1"}, flags={"banana": "1", "cherry": "0"})
    assert [notice.name for notice in settings.notices([])] == ["SM70_MOE_STRIKT", "argument banana", "argument cherry"]
    with pytest.raises(SettingsError) as caught:
        settings.model_copy(update={"strict": True}).notices([])
    assert [line.split(":")[0].split(" is ")[0] for line in str(caught.value).splitlines()] == [
        notice.text.split(":")[0].split(" is ")[0] for notice in settings.notices([])
    ]


def test_strict_mode_refuses_unknown_and_retired_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one error."""
    monkeypatch.setattr(module, "RETIRED", (Retired("SM70_MOE_FAST", "0.2.0", "SM70_MOE_QPN_M1"),))
    settings = Settings.from_env({"SM70_MOE_STRICT": "1", "SM70_MOE_FAST": "1", "SM70_MOE_BANANA": "1"} | SERVICE)
    with pytest.raises(SettingsError) as caught:
        settings.notices([POLICY])
    assert "SM70_MOE_FAST" in str(caught.value)
    assert "SM70_MOE_QPN_M1" in str(caught.value)
    assert "SM70_MOE_BANANA" in str(caught.value)
    assert "SERVICE_HOST" not in str(caught.value)


def test_strict_mode_takes_container_names() -> None:
    """A service called sm70-moe in the same cluster stops nothing."""
    notices = Settings.from_env({"SM70_MOE_STRICT": "1"} | SERVICE).notices([POLICY])
    assert [notice.kind for notice in notices] == [NoticeKind.CONTAINER]


# snapshot, digest, drift


def test_changes_between_two_moments() -> None:
    """Set, unset and edited variables under our prefixes, by name; others do not count."""
    before = Settings.from_env({QPN: "1", GROUPED: "1", "SM70_MOE_STRICT": "0", "HOME": "/a"})
    now = {QPN: "0", "SM70_MOE_STRICT": "0", "SM70_MOE_NEW": "x", "HOME": "/b"}
    expected = (
        Change("SM70_MOE_NEW", None, "x"),
        Change(GROUPED, "1", None),
        Change(QPN, "1", "0"),
    )
    assert before.changes(Settings.from_env(now)) == expected
    assert before.changes(now) == expected
    assert before.changes(before) == ()


def test_changes_are_seen_in_an_environment_that_would_be_refused(tmp_path: Path) -> None:
    """A comparison is a report: a malformed edit is listed, and the file counts as unchanged."""
    path = tmp_path / ".env"
    path.write_text("SM70_MOE_STRICT=1\n")
    before = Settings.from_env({QPN: "1"}, env_file=path)
    assert before.changes({QPN: "banana"}) == (Change(QPN, "1", "banana"),)


def test_the_environment_is_copied() -> None:
    """A mapping that is edited afterwards changes nothing."""
    environment = {QPN: "1"}
    settings = Settings.from_env(environment)
    environment[QPN] = "0"
    assert settings.flag("qpn_m1", [QPN], AUTO).state is REQUIRE
    assert settings.variables == {QPN: "1"}


def test_digest_follows_variables_and_arguments() -> None:
    """Equal inputs give one digest; each input that differs gives another."""
    digests = [
        Settings.from_env({}).digest,
        Settings.from_env({QPN: "1"}).digest,
        Settings.from_env({QPN: "0"}).digest,
        Settings.from_env({"SM70_MOE_UNKNOWN": "1"}).digest,
        Settings.from_env({}, flags={"qpn_m1": "1"}).digest,
        Settings.from_env({}, policy="generic-awq").digest,
        Settings.from_env({"SM70_MOE_POLICY": "generic-awq"}).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert Settings.from_env({QPN: "1", "SM70_MOE_STRICT": "0", "HOME": "/a"}).digest == (
        Settings.from_env({"SM70_MOE_STRICT": "0", QPN: "1"}).digest
    )
    assert len(digests[0]) == 64


def test_settings_cannot_be_changed() -> None:
    """Neither a field nor a view of one."""
    settings = Settings.from_env({QPN: "1"})
    with pytest.raises(ValueError, match="frozen"):
        settings.strict = True
    with pytest.raises(TypeError):
        settings.variables[QPN] = "0"  # type: ignore[index]  # the point of the test
    with pytest.raises(TypeError):
        settings.sources["strict"] = "x"  # type: ignore[index]  # the point of the test


def test_settings_travel() -> None:
    """Worker processes receive settings by pickle; copies are equal and keep their sources."""
    settings = Settings.from_env({QPN: "1"}, policy="generic-awq", flags={"qpn_m1": "0"})
    for other in (pickle.loads(pickle.dumps(settings)), copy.deepcopy(settings)):
        assert other == settings
        assert other.sources == settings.sources
        assert other.digest == settings.digest
        assert hash(other) == hash(settings)


# layers


@pytest.mark.parametrize(
    ("allow", "deny", "index", "expected"),
    [
        (None, None, 0, None),
        (None, None, None, None),
        ("0-2", None, 1, None),
        ("0-2", None, 3, "not allowed"),
        ("0-2", None, None, "unknown"),
        (None, "5", 5, "denied"),
        (None, "5", 4, None),
        (None, "5", None, "unknown"),
        ("0-9", "5", 5, "denied"),
        ("0-9", "5", 4, None),
        ("0-9", "50", 50, "denied"),
        ("0-9", "50", 49, "not allowed"),
    ],
)
def test_layer_exclusion(allow: str | None, deny: str | None, index: int | None, expected: str | None) -> None:
    """Deny wins; a list and no index is unknown."""
    assert Settings.from_env({}, layer_allow=allow, layer_deny=deny).layer_exclusion(index) == expected


# what is not read


def test_a_mapping_stands_for_the_whole_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mapping, not even malformed values of the real environment matter."""
    for name in (QPN, "SM70_MOE_STRICT", "SM70_MOE_POLICY", "SM70_MOE_NEW", "STRICT", "POLICY", "GIVEN"):
        monkeypatch.setenv(name, "banana")
    settings = Settings.from_env({})
    assert settings == Settings()
    assert settings.variables == {}


def test_without_a_mapping_the_environment_is_read_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live environment, at the moment of the call."""
    for name in [name for name in os.environ if name.startswith(("SM70_MOE_", "VLLM_SM70_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(QPN, "0")
    settings = Settings.from_env()
    monkeypatch.setenv(QPN, "1")
    assert settings.variables == {QPN: "0"}
    assert settings.flag("qpn_m1", [QPN], AUTO).state is OFF


def test_a_default_instance_ignores_the_environment_and_dotenv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`Settings()` has no hidden inputs: neither field names in the environment nor a `.env` here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("SM70_MOE_STRICT=1\nSTRICT=1\n")
    monkeypatch.setenv("SM70_MOE_STRICT", "1")
    monkeypatch.setenv("STRICT", "1")
    assert Settings().strict is False
    assert Settings.from_env({}).strict is False


IMPORT = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import sm70_moe.settings.settings
assert not [path for path in opened if path.endswith(".env")], opened
assert "torch" not in sys.modules
"""


def test_import_reads_neither_environment_nor_dotenv(tmp_path: Path) -> None:
    """With malformed variables and a malformed `.env` in the working directory, the import succeeds."""
    (tmp_path / ".env").write_text("SM70_MOE_STRICT=banana\nSM70_MOE_POLICY\n'")
    environment = os.environ | {QPN: "banana", "SM70_MOE_STRICT": "banana", "SM70_MOE_LAYER_DENYLIST": "7-3"}
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
