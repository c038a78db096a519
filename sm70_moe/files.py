"""Files that a command reads, and those that it writes at its end: named before any work is done, written whole.

Links are followed: what they lead to is replaced, not the link.
"""

from __future__ import annotations

import codecs
import json
import os
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from sm70_moe import opening
from sm70_moe.errors import SettingsError


def check_target(option: str, path: Path, endings: tuple[str, ...] = ()) -> None:
    """Raise SettingsError unless a file can be written there; nothing is left behind."""
    if endings and path.suffix not in endings:
        raise SettingsError(f"{option} {path}: accepted are names that end in {' or '.join(endings)}")
    probe, there = beside(path), target(path)
    try:
        if there.is_dir():
            raise SettingsError(f"{option} {path}: is a folder; accepted is the name of a file")
        if there.exists() and not there.is_file():
            raise SettingsError(f"{option} {path}: is no regular file, and would be replaced by one")
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise SettingsError(f"{option} {path}: cannot be written: {error.strerror or error}") from error


MARKS = {codecs.BOM_UTF8: "UTF-8", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
"""Byte order marks, and what they say about a text."""


def text_of(content: bytes) -> str:
    """A file's content as text. Raises ValueError: for a byte order mark by that name, else what is no UTF-8."""
    for mark, encoding in MARKS.items():
        if content.startswith(mark):
            raise ValueError(f"found a byte order mark (BOM) of {encoding}; accepted is UTF-8 text without one")
    return content.decode()


LARGEST_JSON = 2**26
"""Bytes of a JSON file: a hundred times what a long run of `bench` writes."""


def json_of(content: bytes, *, finite: bool = True) -> Any:
    """What JSON says. Raises ValueError for what is no UTF-8, no JSON or nested too deeply; `finite`: and for numbers
    that are not, which a reader that names their keys may refuse itself."""
    strict: dict[str, Any] = {"parse_float": _finite, "parse_constant": _no_number} if finite else {}
    try:
        return json.loads(text_of(content), **strict)
    except RecursionError as error:
        raise ValueError("arrays or tables are nested too deeply") from error


def _finite(text: str) -> float:
    number = float(text)
    return number if isfinite(number) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that JSON and a float both hold")


def read_json(path: Path, accepted: str) -> Any:
    """What a JSON file says. Raises SettingsError that names the file, what is wrong and what is accepted."""
    try:
        return json_of(opening.content(path, LARGEST_JSON, piped=True), finite=False)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}; accepted is {accepted}") from error
    except ValueError as error:
        raise SettingsError(f"{path}: is no JSON: {type(error).__name__}: {error}; accepted is {accepted}") from error


def write(option: str, path: Path, content: bytes) -> None:
    """Write a file, all or nothing. Raises SettingsError that names it."""
    partial = beside(path)
    try:
        partial.write_bytes(content)
        os.replace(partial, target(path))
    except OSError as error:
        raise SettingsError(f"{option} {path}: cannot be written: {error.strerror or error}") from error
    finally:  # an interrupt too leaves nothing behind; after the replacement there is nothing
        with suppress(OSError):
            partial.unlink()


def target(path: Path) -> Path:
    """Where links lead; a loop of them leads nowhere, and raises OSError when it is looked at."""
    return Path(os.path.realpath(path))


def beside(path: Path) -> Path:
    """A name in the same folder that nobody has."""
    found = target(path)
    return found.parent / f".{found.name}.{uuid4().hex}.partial"  # "/" has no name that could be replaced
