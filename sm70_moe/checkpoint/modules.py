"""Which modules an entry of a skip list or of an override table means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from sm70_moe.checkpoint.patterns import Pattern, pattern

REGEX = "re:"

T = TypeVar("T")


class Entries(Generic[T]):
    """Values by entry, found by the modules that the entries mean.

    An entry means every module whose dotted components hold the entry's own one after the other:
    "mlp.gate" means `model.layers.0.mlp.gate`, never `...mlp.gate_proj`; "layers.1" never means
    layer 10. `anchored` entries are whole names, and mean that module and those inside it. An entry
    that starts with "re:" is a regular expression, matched from the beginning (`patterns.Pattern`, which
    raises CheckpointError for what it cannot match). Of several, the one
    with the most components wins; regular expressions come last, in order.
    """

    def __init__(self, pairs: Iterable[tuple[str, T]] = (), anchored: bool = False) -> None:
        self.anchored = anchored
        self.plain: dict[str, T] = {}
        self.patterns: list[tuple[Pattern, T]] = []
        for entry, value in pairs:
            if entry.startswith(REGEX):
                self.patterns.append((pattern(entry.removeprefix(REGEX)), value))
            else:
                self.plain.setdefault(entry.strip("."), value)

    def find(self, module: str) -> T | None:
        """The value of the most specific entry that means this module; None if none does."""
        found = self._by_name(module)
        return self._by_pattern(module) if found is None else found

    def finder(self, layer: str, below: tuple[str, ...]) -> Callable[[str], T | None]:
        """`find` for the modules under `layer`: what cannot tell them apart is looked up once.

        `below` are names that the last component of such a module may have.
        """
        if any(_may_divide(entry, layer, below) for entry in self.plain):
            return self.find
        common = self._by_name(layer)
        if common is None and self.patterns:
            return self._by_pattern
        return lambda _: common

    def may_divide(self, layer: str, below: tuple[str, ...]) -> bool:
        """Whether an entry could mean some and not all modules under `layer`; see `finder`.

        False is certain, True may be wrong.
        """
        return bool(self.patterns) or any(_may_divide(entry, layer, below) for entry in self.plain)

    def _by_name(self, module: str) -> T | None:
        if self.plain:
            # by runs of the name and not by entry: skip lists may hold thousands of names
            for run in _runs(module, self.anchored):
                if run in self.plain:
                    return self.plain[run]
        return None

    def _by_pattern(self, module: str) -> T | None:
        return next((value for one, value in self.patterns if one.match(module)), None)


def matches(entry: str, module: str) -> bool:
    """Whether `entry` means the module; `Entries` has the rule."""
    return Entries([(entry, True)]).find(module) is not None


def _runs(module: str, anchored: bool) -> Iterator[str]:
    """All runs of a dotted name's components, or those from its beginning, longest first."""
    components = module.split(".")
    for length in range(len(components), 0, -1):
        for start in range(1 if anchored else len(components) - length + 1):
            yield ".".join(components[start : start + length])


def _may_divide(entry: str, layer: str, below: tuple[str, ...]) -> bool:
    last = layer.rpartition(".")[2]
    head, found, _ = entry.partition(f"{last}.")
    if found:
        return f".{layer}".endswith(f".{head}{last}")
    final = entry.rpartition(".")[2]
    return entry.count(".") < 2 and (final in below or final.isdigit())
