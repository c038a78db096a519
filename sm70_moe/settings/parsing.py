"""Reading the text of a setting, strictly: each function names the variable, the value and what is accepted."""

from __future__ import annotations

import re
from pathlib import Path

from sm70_moe.errors import SettingsError
from sm70_moe.settings.flags import parse_switch

MOST_RESIDENT_TOKENS = 32
"""Resident scratch never serves more tokens than this (CONTRACT 2)."""

ASSUMPTIONS = ("plain-silu",)
"""What may be assumed of an arithmetic that is not known: silu of the gate times up, router weight on the output."""


def parse_tokens(variable: str, text: str) -> int:
    """Read a number of tokens: plain decimal digits, no sign, spaces, underscores or leading zeros."""
    if not re.fullmatch("0|[1-9][0-9]?", text) or int(text) > MOST_RESIDENT_TOKENS:
        raise SettingsError(
            f"{variable}={text!r}: accepted is 0 (derive), or a whole number from 1 to {MOST_RESIDENT_TOKENS}"
        )
    return int(text)


def parse_name(variable: str, text: str) -> str:
    """Read a name or path; an empty or blank one is an error, not "unset"."""
    if not text.strip():
        raise SettingsError(f"{variable}={text!r}: accepted is a name or path that is not empty")
    return text


def parse_path(variable: str, text: str) -> Path:
    """Read a path that is not empty."""
    return Path(parse_name(variable, text))


def parse_place(variable: str, text: str) -> Path | bool:
    """Read a path that is not empty, or `0` (nowhere) or `1` (the usual place)."""
    return parse_switch(variable, text) if text in ("0", "1") else parse_path(variable, text)


def parse_assumption(variable: str, text: str) -> str:
    """Read what to take for an arithmetic that is not known: one of `ASSUMPTIONS`."""
    if text not in ASSUMPTIONS:
        raise SettingsError(f"{variable}={text!r}: accepted is {', '.join(ASSUMPTIONS)}")
    return text


TAKES = ("native", "all", "none")
"""Layers that are taken from an engine which can run them itself, by what our routes there are."""


def parse_take(variable: str, text: str) -> str:
    """Read which layers to take from an engine: one of `TAKES`."""
    if text not in TAKES:
        raise SettingsError(f"{variable}={text!r}: accepted are {', '.join(TAKES)}")
    return text


def rooted(path: Path | bool | None) -> Path | bool | None:
    """The place that was meant when settings were read, wherever the process goes later."""
    return path.absolute() if isinstance(path, Path) else path
