"""How checkpoints name the tensors of experts, as tables: another model's names are another row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from sm70_moe.checkpoint.headers import TensorEntry
from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.formats import WEIGHT

MARKER = ".experts."
"""Stands between the name of a layer and what its experts are called, in every scheme below."""

LONGEST_LAYER = 255
"""Characters of a layer's name; the longest known has 60."""
MOST_DIGITS = 9
"""Of a number in a name."""

MATRICES = ("gate", "up", "down")
BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Names of the matrices under `LAYER.experts`.

    Per expert: `N.GATE.KIND` and so on. `stacked`: `GATE.KIND` with the experts as the first
    dimension, `joint` between the two; an unquantised one is called `GATE` alone as well. If gate
    and up have the same name they are one matrix, the gate's columns first. A scheme without a
    gate has "" for it.
    """

    gate: str
    up: str
    down: str
    stacked: bool = False
    joint: str = "."

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names, each once."""
        return tuple(dict.fromkeys(name for name in (self.gate, self.up, self.down) if name))

    @property
    def gated(self) -> bool:
        return bool(self.gate)

    @property
    def fused(self) -> bool:
        """Are gate and up halves of one matrix?"""
        return self.gate == self.up

    def name(self, matrix: str) -> str:
        """The scheme's name of "gate", "up" or "down"."""
        return {"gate": self.gate, "up": self.up, "down": self.down}[matrix]

    def tail(self, expert: int, name: str, kind: str) -> str:
        """What follows the marker in the name of a tensor."""
        return f"{name}{self.joint}{kind}" if self.stacked else f"{expert}.{name}.{kind}"

    def kinds(self, tails: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(matrix name, kind) of the tails that a stacked scheme has."""
        for tail in tails:
            for name in self.matrices:
                if tail == name:
                    yield name, WEIGHT
                elif tail.startswith(name + self.joint):
                    yield name, tail.removeprefix(name + self.joint)


SCHEMES = (
    # Qwen, DeepSeek, Kimi, GLM, ERNIE, OLMoE, LongCat, Laguna; gpt-oss where a quantiser took it apart
    Scheme("gate_proj", "up_proj", "down_proj"),
    # Mixtral, MiniMax, Phi, LFM: w2 is the down projection
    Scheme("w1", "w3", "w2"),
    # Grok
    Scheme("linear", "linear_v", "linear_1"),
    # Nemotron-H: no gate
    Scheme("", "up_proj", "down_proj"),
    # transformers 5 holds experts so; compressed-tensors and GPTQ writers name the kind after a dot
    Scheme("gate_up_proj", "gate_up_proj", "down_proj", stacked=True),
    # writers that keep parameters without modules: Olive, gpt-oss
    Scheme("gate_up_proj", "gate_up_proj", "down_proj", stacked=True, joint="_"),
    Scheme("gate_proj", "up_proj", "down_proj", stacked=True),
)


@lru_cache(maxsize=64)
def tails_of(scheme: Scheme, experts: int, name: str, kind: str) -> tuple[str, ...]:
    """The tails of one kind of tensor, for every expert or for their stack.

    Kept, because 48 alike layers would make 200,000 names again and again.
    """
    return tuple(scheme.tail(expert, name, kind) for expert in range(1 if scheme.stacked else experts))


ASIDE = ("mtp", "nextn", "visual", "vision")
"""Beginnings of components that hold layers beside the model's own, with numbers of their own:
multi-token prediction (`mtp.layers.0`, `model.mtp_block.0`) and towers for images."""

NEIGHBOURS = {
    "shared experts": ("shared_expert", "shared_experts", "shared_mlp"),
    "router": ("gate", "router", "shared_expert_gate"),
}
"""What stands beside routed experts and stays the engine's: the component after the block's name."""

Tails = dict[str, TensorEntry]
"""A layer's tensors by what follows the marker: "0.gate_proj.qweight"."""


def experts_elsewhere(others: Iterable[str], kinds: Collection[str]) -> list[str]:
    """Names outside the schemes that look like experts' tensors of these kinds: in order, shared ones left out."""
    shared = NEIGHBOURS["shared experts"]
    found = []
    for name in others:
        if "expert" in name:
            parts = name.split(".")
            if parts[-1] in kinds and any("expert" in part and not part.startswith(shared) for part in parts[:-1]):
                found.append(name)
    return found


def group_by_layer(shards: Iterable[Tails]) -> tuple[dict[str, Tails], list[str]]:
    """The experts' tensors by layer, "model.layers.0.mlp.experts" -> tails, and the names of all other tensors.

    Raises CheckpointError for a layer whose name is absurdly long or holds a number that is none.
    """
    layers: dict[str, Tails] = {}
    others: list[str] = []
    for entries in shards:
        layer, tails = "", layers.setdefault("", {})
        for name, entry in entries.items():
            prefix, marked, tail = name.partition(MARKER)
            if not marked:
                others.append(name)
                continue
            if prefix != layer:  # neighbours mostly belong to one layer
                layer, tails = prefix, layers.setdefault(prefix, {})
                if len(prefix) > LONGEST_LAYER:
                    raise CheckpointError(
                        f"{entry.file}: tensor {name[:80]}...: {len(prefix)} characters before {MARKER!r}; accepted "
                        f"are at most {LONGEST_LAYER}"
                    )
            tails[tail] = entry
    found = {layer: tails for layer, tails in layers.items() if tails}
    ordered = sorted(found.items(), key=_natural)
    return {f"{prefix}{MARKER[:-1]}" if prefix else MARKER.strip("."): tails for prefix, tails in ordered}, others


def neighbours(layers: Iterable[str], others: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What stands beside each layer's experts, by `NEIGHBOURS`: layer -> ("shared experts", "router")."""
    blocks = {layer: layer.removesuffix(MARKER[:-1]) for layer in layers}
    beside: dict[str, set[str]] = {block: set() for block in blocks.values()}
    for name in others:
        for what, components in NEIGHBOURS.items():
            for component in components:
                block, found, _ = name.partition(f".{component}.")
                if found and block in beside:
                    beside[block].add(what)
    return {layer: tuple(w for w in NEIGHBOURS if w in beside[block]) for layer, block in blocks.items()}


def _natural(item: tuple[str, Tails]) -> tuple[tuple[bool, int, str], ...]:
    """Order of layers: numbers by value, so that 10 comes after 9."""
    numbered = ((part, number(part, item[0])) for part in item[0].split("."))
    return tuple((value is not None, value or 0, part) for part, value in numbered)


def number(component: str, name: str) -> int | None:
    """The number that a component of a dotted name is; None for a word.

    Raises CheckpointError, with the whole name, for digits that are no plain number: "007", "²",
    thousands of them.
    """
    if not component.isdigit():
        return None
    if not component.isascii() or len(component) > MOST_DIGITS or (component[0] == "0" and component != "0"):
        raise CheckpointError(
            f"{name[:LONGEST_LAYER]}: number {component[:40]!r}; accepted are at most {MOST_DIGITS} digits 0 to 9, "
            "the first not 0"
        )
    return int(component)


def layer_index(layer: str) -> int | None:
    """The last number in a layer's name; None if there is none, or if it is not a layer of the model's own.

    Raises what `number` raises.
    """
    parts = layer.split(".")
    if any(part.startswith(ASIDE) for part in parts):
        return None
    numbers = [found for part in parts if (found := number(part, layer)) is not None]
    return numbers[-1] if numbers else None


class Census:
    """Which experts and kinds of tensors the tails of a layer name. Layers mostly share one.

    `layer` is the first that has these, for errors: of an expert's number that is none.
    """

    def __init__(self, tails: frozenset[str], layer: str = "layer") -> None:
        self.tails = tails
        self.layer = layer
        self._missing: dict[tuple[tuple[str, ...], int], tuple[str, ...]] = {}
        self._unread: dict[frozenset[str], tuple[str, ...]] = {}

    @classmethod
    def shared(cls, layer: str, tails: Tails, known: dict[frozenset[str], Census]) -> Census:
        """The census of these tails, one of `known` if their names are the same; else a new one."""
        latest = next(reversed(known.values()), None)
        if latest is not None and latest.tails == tails.keys():  # the usual case, without a set of thousands
            return latest
        names = frozenset(tails)
        if names not in known:
            known[names] = cls(names, layer)
        return known[names]

    @cached_property
    def scheme(self) -> Scheme | None:
        """The scheme that names the most tails, of equal ones that with the fewest matrices; None if none does."""
        counts = {scheme: len(self._named(scheme)) for scheme in SCHEMES}
        best = max(SCHEMES, key=lambda scheme: (counts[scheme], -len(scheme.matrices)))
        return best if counts[best] else None

    def _named(self, scheme: Scheme) -> list[tuple[str, str]]:
        """(matrix name, kind) of every tail that the scheme has a name for."""
        if scheme.stacked:
            return list(scheme.kinds(tail for tail in self.tails if not tail[:1].isdigit()))
        names = scheme.matrices
        return [(matrix, kind) for _, matrix, kind in self.parts if matrix in names]

    @cached_property
    def parts(self) -> tuple[tuple[int, str, str], ...]:
        """(expert, matrix name, kind) of every tail of a single expert."""
        split = (tail.split(".", 2) for tail in self.tails)
        return tuple(
            (expert, part[1], part[2])
            for part in split
            if len(part) == 3 and (expert := number(part[0], f"tensor {self.layer}.{'.'.join(part)}")) is not None
        )

    @cached_property
    def experts(self) -> frozenset[int]:
        """Numbers of experts that have tensors of their own; none where experts are stacked."""
        return frozenset(expert for expert, _, _ in self.parts)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """What the experts' matrices consist of: "qweight", "scales", "weight" and so on."""
        if self.scheme is not None and self.scheme.stacked:
            return frozenset(kind for _, kind in self._named(self.scheme))
        names = None if self.scheme is None else self.scheme.matrices
        return frozenset(kind for _, matrix, kind in self.parts if names is None or matrix in names)

    def unread(self, kinds: frozenset[str]) -> tuple[str, ...]:
        """Tails that are no tensor of these kinds of any of the scheme's matrices, in order."""
        if kinds not in self._unread:
            scheme = self.scheme
            names = () if scheme is None else scheme.matrices
            if scheme is not None and scheme.stacked:
                ends = {f"{name}{scheme.joint}{kind}" for name in names for kind in kinds} | set(names)
                left = [tail for tail in self.tails if tail not in ends]
            else:
                ends = {f"{name}.{kind}" for name in names for kind in kinds}
                left = [tail for tail in self.tails if tail.partition(".")[2] not in ends]
            self._unread[kinds] = tuple(sorted(left))
        return self._unread[kinds]

    @cached_property
    def bias(self) -> bool:
        """Has any matrix a bias?"""
        return BIAS in self.kinds or any(tail.endswith(f"_{BIAS}") for tail in self.tails)

    def missing(self, kinds: tuple[str, ...], experts: int) -> tuple[str, ...]:
        """Tails that `experts` experts with these kinds need and that are not there, in order."""
        if (kinds, experts) not in self._missing:
            self._missing[kinds, experts] = tuple(self._lacking(kinds, experts))
        return self._missing[kinds, experts]

    def _lacking(self, kinds: tuple[str, ...], experts: int) -> Iterator[str]:
        scheme = self.scheme
        if scheme is None:
            return
        for number in range(1 if scheme.stacked else experts):
            for name in scheme.matrices:
                for kind in kinds:
                    tail = scheme.tail(number, name, kind)
                    if tail not in self.tails and not (scheme.stacked and kind == WEIGHT and name in self.tails):
                        yield tail
