"""Which experts each layer of a measurement asks for.

A layer's tokens choose experts as a rule says; the experts that come out are then renamed by a
shuffled deck of all experts, one for each bank, that is dealt onwards from layer to layer. So the
number of different experts is that of the rule, and a bank's experts come again only after all of
its others: what is measured is memory, not the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from sm70_moe.benchmark.protocol import HALF_SHARED, OVERLAPPING, UNIFORM
from sm70_moe.errors import SettingsError

Ids = NDArray[np.int32]
Rule = Callable[[np.random.Generator, int, int, int], Ids]
"""(source, tokens, top_k, experts) -> ids (tokens, top_k), different within a row."""


def uniform(source: np.random.Generator, tokens: int, top_k: int, experts: int) -> Ids:
    """Every token takes its own."""
    return np.stack([source.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)


def overlapping(source: np.random.Generator, tokens: int, top_k: int, experts: int) -> Ids:
    """All tokens take the same."""
    return np.repeat(uniform(source, 1, top_k, experts), tokens, axis=0)


def half_shared(source: np.random.Generator, tokens: int, top_k: int, experts: int) -> Ids:
    """The first half of the slots is the same for all tokens, the others are a token's own."""
    deck = source.permutation(experts).astype(np.int32)
    shared, rest = deck[: top_k // 2], deck[top_k // 2 :]
    own = [source.permutation(rest)[: top_k - top_k // 2] for _ in range(tokens)]
    return np.stack([np.concatenate((shared, mine)) for mine in own])


RULES: Mapping[str, Rule] = {UNIFORM: uniform, OVERLAPPING: overlapping, HALF_SHARED: half_shared}


@dataclass(frozen=True, slots=True)
class Routing:
    """Ids (layers, tokens, top_k) INT32 of a graph's layers; layer n reads bank n % `banks`."""

    name: str
    ids: Ids
    banks: int

    @classmethod
    def make(cls, name: str, layers: int, banks: int, tokens: int, top_k: int, experts: int, seed: int = 0) -> Routing:
        """The same arguments give the same ids. Raises SettingsError for an unknown name."""
        if name not in RULES:
            raise SettingsError(f"routing {name!r}: accepted are {', '.join(RULES)}")
        source = np.random.default_rng((seed, tokens, sorted(RULES).index(name)))
        decks = [source.permutation(experts).astype(np.int32) for _ in range(banks)]
        dealt = [0] * banks
        tables = []
        for layer in range(layers):
            pattern, bank = RULES[name](source, tokens, top_k, experts), layer % banks
            found, place = np.unique(pattern, return_inverse=True)
            hand = np.take(decks[bank], np.arange(dealt[bank], dealt[bank] + len(found)), mode="wrap")
            dealt[bank] += len(found)
            tables.append(hand[place.reshape(pattern.shape)])
        return cls(name, np.stack(tables), banks)

    @property
    def layers(self) -> int:
        return len(self.ids)

    def distinct(self, layer: int) -> Ids:
        """The different experts of a layer, sorted."""
        return np.unique(self.ids[layer])

    @property
    def most_distinct(self) -> int:
        return max(len(self.distinct(layer)) for layer in range(self.layers))

    def mean_distinct(self, layers: int | None = None) -> float:
        """Different experts a layer, on average over the first `layers`, or all of them."""
        return fmean(len(self.distinct(layer)) for layer in range(layers or self.layers))


def routings(tokens: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those that differ: one token shares with nobody."""
    return names[:1] if tokens == 1 else names
