"""Reading config.json strictly: aliases must agree, and a wrong type is an error, not a guess."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

import msgspec

from sm70_moe.errors import CheckpointError
from sm70_moe.regular import read_text

JSON_NAMES = {bool: "true or false", int: "an integer", str: "a text", dict: "a table", list: "a list"}
LARGEST = 2**31 - 1
"""Of a count, unless it is told otherwise."""

SHORT = Repr()
"""A file's value in a message: it may be a whole table, nested as deep as one likes."""
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 80

K = TypeVar("K")


class Fields:
    """One JSON table of a file. `path` are the keys that lead to it, for errors.

    A fact that is missing here is looked up in the table `behind`, if there is one.
    """

    def __init__(self, file: Path, values: Mapping[str, Any], path: str = "", behind: Fields | None = None) -> None:
        self.file = file
        self.values = values
        self.path = path
        self.behind = behind

    @classmethod
    def load(cls, file: Path) -> Fields:
        """Read a file; raises CheckpointError if it cannot be read or holds no JSON table."""
        try:
            values = msgspec.json.decode(read_text(file))
        except RecursionError as error:
            raise CheckpointError(f"{file}: is nested too deeply; accepted is a table of a model's facts") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: holds {SHORT.repr(values)}; accepted is a table")
        return cls(file, values)

    def integer(self, *names: str) -> int | None:
        return self._one(int, names)

    def text(self, *names: str) -> str | None:
        return self._one(str, names)

    def flag(self, *names: str) -> bool | None:
        return self._one(bool, names)

    def texts(self, *names: str) -> tuple[str, ...]:
        """All texts of these lists, in order; a list that is missing counts as empty."""
        lists = [(name, self._get(list, name) or []) for name in names]
        for name, items in lists:
            for item in items:
                if not isinstance(item, str):
                    raise self.fault(name, item, "a text")
        return tuple(item for _, items in lists for item in items)

    def table(self, name: str) -> Fields | None:
        values = self._get(dict, name)
        if values is None:
            return self.behind.table(name) if self.behind else None
        return Fields(self.file, values, f"{self.path}{name}.")

    def value(self, name: str) -> object:
        """The value as it is, here or behind; None if it is nowhere."""
        found = self.values.get(name)
        return self.behind.value(name) if found is None and self.behind else found

    def inner(self, path: str) -> Fields | None:
        """A table inside this one, by dots."""
        found: Fields | None = self
        for name in path.split("."):
            found = None if found is None else found.table(name)
        return found

    def given(self, name: str) -> object:
        """The value as it is, None if it is missing or empty: for keys whose mere presence matters."""
        return self.values.get(name) or None

    def size(self, *names: str) -> int | None:
        """An integer. A list of one for each layer counts as that integer if all are the same, and as
        unknown if they differ.
        """
        given = [self.values[name] for name in names if self.values.get(name) is not None]
        if not given and self.behind:
            return self.behind.size(*names)
        if len(given) == 1 and isinstance(given[0], list) and {type(item) for item in given[0]} == {int}:
            sizes: set[int] = set(given[0])
            return sizes.pop() if len(sizes) == 1 else None
        return self.integer(*names)

    def count(self, *names: str, lists: bool = False, largest: int = LARGEST) -> int | None:
        """An integer, or with `lists` a `size`, from 1 to `largest`."""
        found = self.size(*names) if lists else self.integer(*names)
        if found is not None and not 1 <= found <= largest:
            raise self.owner(*names).fault(self.name(*names), found, f"an integer from 1 to {largest}")
        return found

    def owner(self, *names: str) -> Fields:
        """The table that gives one of these, this one or the one behind it."""
        given = any(self.values.get(name) is not None for name in names)
        return self if given or self.behind is None else self.behind.owner(*names)

    def name(self, *names: str) -> str:
        """The first of these that is given."""
        values = self.owner(*names).values
        return next((name for name in names if values.get(name) is not None), names[0])

    def number(self, name: str) -> float | None:
        """An integer or a fraction."""
        value = self.values.get(name)
        if value is None:
            return self.behind.number(name) if self.behind else None
        if type(value) not in (int, float):
            raise self.fault(name, value, "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.fault(name, value, "a number below 1e308") from error

    def before(self, other: Fields) -> Fields:
        """These fields, with `other` behind them."""
        return Fields(self.file, self.values, self.path, other)

    def fault(self, name: str, value: object, accepted: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.path}{name} is {SHORT.repr(value)}; accepted is {accepted}")

    def _one(self, kind: type[K], names: tuple[str, ...]) -> K | None:
        """The value that all given aliases agree on; None if none is given."""
        given = {name: value for name in names if (value := self._get(kind, name)) is not None}
        if len(set(given.values())) > 1:
            told = " and ".join(f"{self.path}{name} = {SHORT.repr(value)}" for name, value in given.items())
            raise CheckpointError(f"{self.file}: {told} contradict each other")
        if not given and self.behind:
            return self.behind._one(kind, names)
        return next(iter(given.values()), None)

    def _get(self, kind: type[K], name: str) -> K | None:
        value: K | None = self.values.get(name)
        # `type` and not `isinstance`: a bool is an int in Python, and is none here
        if value is not None and type(value) is not kind:
            raise self.fault(name, value, JSON_NAMES[kind])
        return value
