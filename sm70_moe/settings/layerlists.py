"""Lists of layer ids, as operators write them: `0-2,5`.

    list = item *("," item)
    item = N | N-M          with N <= M, both from 0 to 100000

Numbers are plain decimal digits: no sign, no spaces, no leading zeros, no empty items. An empty text
is no list (leave the variable unset instead). Items may overlap and stand in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sm70_moe.errors import SettingsError

LARGEST_LAYER = 100_000
"""No model comes near; a larger id is a slip of the keyboard."""

NUMBER = "(0|[1-9][0-9]{0,5})"
ITEM = re.compile(f"{NUMBER}(?:-{NUMBER})?")
GRAMMAR = f"N or N-M (N <= M, both 0 to {LARGEST_LAYER}), joined by commas, without spaces"

Range = tuple[int, int]
"""First and last layer id, both included."""


@dataclass(frozen=True, slots=True)
class LayerList:
    """A set of layer ids; `str` gives its shortest text, and equal sets are equal.

    `ranges` are ascending, with at least one id between two of them.
    """

    ranges: tuple[Range, ...] = ()

    @classmethod
    def parse(cls, variable: str, text: str) -> LayerList:
        """Read a list; SettingsError names the variable, its value and every item that is wrong."""
        ranges: list[Range] = []
        wrong: list[str] = []
        for item in text.split(","):
            found = parse_item(item)
            if found is None:
                wrong.append(repr(item))
            else:
                ranges.append(found)
        if wrong:
            items = "item" if len(wrong) == 1 else "items"
            raise SettingsError(f"{variable}={text!r}: {items} {', '.join(wrong)} not accepted; accepted is {GRAMMAR}")
        return cls(merge(ranges))

    def __contains__(self, layer: int) -> bool:
        return any(first <= layer <= last for first, last in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)


def parse_item(item: str) -> Range | None:
    """First and last id of one item, or None if it is malformed, reversed or too large."""
    match = ITEM.fullmatch(item)
    if match is None:
        return None
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    return (first, last) if first <= last <= LARGEST_LAYER else None


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same ids in ascending ranges that neither overlap nor touch."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
