"""How checkpoints name the tensors of experts, as a table: another scheme is another row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from sm70_moe.weights.headers import TensorEntry

MARKER = ".experts."
"""Stands between the name of a layer and the number of an expert."""

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Scheme:
    """Names of an expert's three matrices: `LAYER.experts.N.GATE.KIND` and so on."""

    gate: str
    up: str
    down: str

    @property
    def matrices(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down


SCHEMES = (
    Scheme("gate_proj", "up_proj", "down_proj"),
    Scheme("w1", "w3", "w2"),  # Mixtral: w2 is the down projection
)

Tails = dict[str, TensorEntry]
"""A layer's tensors by what follows the marker: "0.gate_proj.qweight"."""


def group_by_layer(shards: Iterable[Tails]) -> dict[str, Tails]:
    """The experts' tensors by layer: "model.layers.0.mlp.experts" -> tails. Other tensors are left out."""
    layers: dict[str, Tails] = {}
    for entries in shards:
        layer, tails = "", layers.setdefault("", {})
        for name, entry in entries.items():
            prefix, marked, tail = name.partition(MARKER)
            if not marked:
                continue
            if prefix != layer:  # neighbours mostly belong to one layer
                layer, tails = prefix, layers.setdefault(prefix, {})
            tails[tail] = entry
    found = {layer: tails for layer, tails in layers.items() if tails}
    return {(prefix + MARKER).strip("."): tails for prefix, tails in sorted(found.items(), key=_natural)}


def _natural(item: tuple[str, Tails]) -> tuple[tuple[bool, int, str], ...]:
    """Order of layers: numbers by value, so that 10 comes after 9."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in item[0].split("."))


def layer_index(layer: str) -> int | None:
    """The last number in a layer's name; None if there is none."""
    numbers = [int(part) for part in layer.split(".") if part.isdigit()]
    return numbers[-1] if numbers else None


class Census:
    """Which experts and kinds of tensors the tails of a layer name. Layers mostly share one."""

    def __init__(self, tails: frozenset[str]) -> None:
        self.tails = tails
        self._missing: dict[tuple[tuple[str, ...], int], tuple[str, ...]] = {}

    @classmethod
    def shared(cls, tails: Tails, known: list[Census]) -> Census:
        """The census of these tails, one of `known` if their names are the same; else a new one."""
        found = next((census for census in known if census.tails == tails.keys()), None)
        if found is None:
            found = cls(frozenset(tails))
            known.append(found)
        return found

    @cached_property
    def scheme(self) -> Scheme | None:
        """The scheme that names the most tails; None if none names any."""
        best = max(SCHEMES, key=lambda scheme: sum(1 for _, matrix, _ in self.parts if matrix in scheme.matrices))
        return best if any(matrix in best.matrices for _, matrix, _ in self.parts) else None

    @cached_property
    def parts(self) -> tuple[tuple[int, str, str], ...]:
        """(expert, matrix name, kind) of every tail of that form."""
        split = (tail.split(".", 2) for tail in self.tails)
        return tuple((int(part[0]), part[1], part[2]) for part in split if len(part) == 3 and part[0].isdigit())

    @cached_property
    def experts(self) -> frozenset[int]:
        return frozenset(expert for expert, _, _ in self.parts)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """What the experts' matrices consist of: "qweight", "scales", "weight" and so on."""
        return frozenset(kind for _, _, kind in self.parts)

    def missing(self, kinds: tuple[str, ...], experts: int) -> tuple[str, ...]:
        """Tails that `experts` experts with these kinds need and that are not there, in order."""
        if (kinds, experts) not in self._missing:
            matrices = self.scheme.matrices if self.scheme else ()
            needed = [f"{n}.{matrix}.{kind}" for n in range(experts) for matrix in matrices for kind in kinds]
            self._missing[kinds, experts] = tuple(tail for tail in needed if tail not in self.tails)
        return self._missing[kinds, experts]
