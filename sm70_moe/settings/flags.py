"""The three-state flag: one parser, one meaning, for every flag of every policy.

Not set is `auto` or `off` (the policy says which), `1` is `require`, `0` is `off`. Anything else is
an error, because each wider dialect has read somebody's "no" as a yes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sm70_moe.errors import SettingsError

ACCEPTED = {"0": False, "1": True}
"""Every text that a switch or a flag may have. No case folding, no stripping."""


class FlagState(StrEnum):
    """What the operator wants of one feature."""

    AUTO = "auto"  # use it where everything allows it, else fall back and say why
    REQUIRE = "require"  # use it, or stop and list what is against it
    OFF = "off"  # do not use it, do not look for it


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A flag's state and where it came from.

    `source` is "unset" (the policy's default), "argument", "environment NAME" or
    ".env file PATH: NAME". An explicit `1` and a default that means the same differ here.
    """

    state: FlagState
    source: str


class Flagged(Protocol):
    """What a policy says about one feature's flag: its variables, and its state when none is set."""

    @property
    def env(self) -> tuple[str, ...]: ...

    @property
    def unset(self) -> str: ...


class FlaggedPolicy(Protocol):
    """Anything that holds features by name; policies do."""

    @property
    def features(self) -> Mapping[str, Flagged]: ...


def parse_switch(variable: str, value: str) -> bool:
    """Read `0` or `1`; SettingsError on anything else, also on the empty string."""
    if value not in ACCEPTED:
        raise SettingsError(f"{variable}={value!r}: accepted values are 0 and 1")
    return ACCEPTED[value]


def parse_flag(variable: str, value: str) -> FlagState:
    """Read the state of a flag that was set; SettingsError on anything but `0` or `1`."""
    return FlagState.REQUIRE if parse_switch(variable, value) else FlagState.OFF
