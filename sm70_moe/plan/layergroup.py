"""Layers that were decided alike, told once: "layers 0-47" instead of 48 times the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sm70_moe.admission.admit import Admission
from sm70_moe.facts import LayerFacts


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Admissions with the same decisions; `example` is the first of them."""

    example: Admission
    layers: tuple[str, ...]
    indices: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def numbers(self) -> str:
        """ "0-47", "0-3,7", or "" for layers without an index."""
        return ranges(self.indices)

    @property
    def name(self) -> str:
        """The layer's name, its index replaced by the numbers of the group."""
        first = self.layers[0]
        if self.count == 1:
            return first
        before, number, after = around_index(first, self.example.facts.index)
        return f"{before}{self.numbers}{after}" if number else f"{first} and {self.count - 1} more"

    def joins(self, admission: Admission) -> bool:
        return alike(self.example, admission)

    def with_layer(self, facts: LayerFacts) -> LayerGroup:
        indices = self.indices if facts.index is None else (*self.indices, facts.index)
        return replace(self, layers=(*self.layers, facts.layer), indices=indices)

    @classmethod
    def of(cls, admission: Admission) -> LayerGroup:
        return cls(admission, (), ()).with_layer(admission.facts)


def alike(a: Admission, b: Admission) -> bool:
    """Would a reader of both decisions learn anything from the second?"""
    return (
        a.decisions == b.decisions
        and a.layout == b.layout
        and a.policy.digest == b.policy.digest
        and stack(a.facts) == stack(b.facts)
        and replace(a.facts, layer="", index=None) == replace(b.facts, layer="", index=None)
    )


def stack(facts: LayerFacts) -> tuple[str, str]:
    """The name without the index: equal for layers of one stack."""
    before, _, after = around_index(facts.layer, facts.index)
    return before, after


def around_index(layer: str, index: int | None) -> tuple[str, str, str]:
    """A layer's name before its index, the index, and after it; the last dotted part that is the index counts.

    Without one the whole name is "before", so that only layers of one stack are alike.
    """
    parts = layer.split(".") if index is not None else []
    for place in range(len(parts) - 1, -1, -1):
        if parts[place] == str(index):
            return ".".join([*parts[:place], ""]), parts[place], ".".join(["", *parts[place + 1 :]])
    return layer, "", ""


def collapse(admissions: Iterable[Admission]) -> Iterator[LayerGroup]:
    """Groups of alike layers whatever their order, each where its first layer stands."""
    groups: list[LayerGroup] = []
    for admission in admissions:
        gather(groups, admission)
    yield from groups


def gather(groups: list[LayerGroup], admission: Admission) -> None:
    """Put a layer into the group that it joins, or into one of its own at the end."""
    for place in reversed(range(len(groups))):
        if groups[place].joins(admission):
            groups[place] = groups[place].with_layer(admission.facts)
            return
    groups.append(LayerGroup.of(admission))


def ranges(indices: tuple[int, ...]) -> str:
    """Ascending numbers as "0-3,7"."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][-1] + 1 == index:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)
