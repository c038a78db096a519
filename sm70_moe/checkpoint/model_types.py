"""What model types compute, as data: `model_types.toml`, and a user's file of the same form before it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from sm70_moe import opening
from sm70_moe.errors import SettingsError

SHIPPED = Path(__file__).with_name("model_types.toml")

Text = Annotated[str, msgspec.Meta(min_length=1)]


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model types with one arithmetic; the file's head says what the fields mean."""

    source: Text
    model_types: list[Text]
    activation: str = ""
    activation_is: str = ""
    router_weight: Literal["output", "input"] = "output"
    differs: str = ""


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of config.json that are read for every model type, and words of those that somebody should have read."""

    activation: list[str]
    clamp: list[str]
    router_weight: list[str]
    width: list[str]
    differs: dict[str, str]
    suspect: list[str]
    elsewhere: list[str]
    harmless: list[str]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: Literal[1]
    family: list[Family] = []
    keys: Keys | None = None


@dataclass(frozen=True, slots=True)
class ModelTypes:
    """The table: families by model type, and the keys that count. `file` is where the first rows stand."""

    families: dict[str, Family]
    keys: Keys

    def suspicious(self, key: str) -> bool:
        """Could a key of this name change what experts compute?"""
        if key in self.keys.harmless or _has(key, tuple(self.keys.elsewhere)):
            return False
        return _has(key, tuple(self.keys.suspect))


@cache
def _words(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("(?:^|_)(?:" + "|".join(map(re.escape, words)) + ")s?(?:_|$)")


def _has(key: str, words: tuple[str, ...]) -> bool:
    """Has a key one of these between its underscores?"""
    return _words(words).search(key.lower()) is not None


def read_model_types(own: Path | None = None) -> ModelTypes:
    """The package's table, the rows of the file `own` before it.

    Raises SettingsError naming the file for one that cannot be read, is not of the form, or says two
    things of one type.
    """
    shipped = _shipped()
    if own is None:
        return shipped
    found = _read(own)
    return ModelTypes(shipped.families | _by_type(own, found.family), found.keys or shipped.keys)


@cache
def _shipped() -> ModelTypes:
    found = _read(SHIPPED)
    assert found.keys is not None
    return ModelTypes(_by_type(SHIPPED, found.family), found.keys)


LARGEST = 1 << 20
"""Bytes of a table of model types."""


def _read(file: Path) -> _File:
    try:
        content: dict[str, Any] = tomllib.loads(opening.content(file, LARGEST).decode())
        return msgspec.convert(content, _File)
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, msgspec.ValidationError) as error:
        raise SettingsError(f"{file}: is no table of model types: {error}") from error


def _by_type(file: Path, families: Iterable[Family]) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for family in families:
        if bool(family.activation) == bool(family.activation_is):
            raise SettingsError(
                f"{file}: {family.model_types}: activation {family.activation!r} and activation_is "
                f"{family.activation_is!r}; accepted is one of the two"
            )
        for name in family.model_types:
            if name in found:
                raise SettingsError(f"{file}: model type {name!r} is there twice; accepted is once")
            found[name] = family
    return found
