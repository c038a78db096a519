"""How many experts a call touches."""

from __future__ import annotations

from dataclasses import dataclass

from sm70_moe.errors import SettingsError

UNIFORM, OVERLAPPING = "uniform", "overlapping"
KINDS = (UNIFORM, OVERLAPPING)
SERVED = 4
"""Tokens that one W13 block serves; another serves the rest (`kServed` of w13.cuh)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """`distinct` experts of a call on average, and the W13 blocks with work for each octet of columns."""

    kind: str
    distinct: float
    groups: float

    @classmethod
    def of(cls, kind: str, tokens: int, top_k: int, experts: int) -> Routing:
        """Uniform: every token takes any k of E. Overlapping: all take the same. Raises SettingsError."""
        if kind not in KINDS:
            raise SettingsError(f"routing {kind!r}: accepted are {', '.join(KINDS)}")
        if kind == UNIFORM:
            distinct = experts * (1 - (1 - top_k / experts) ** tokens)
            return cls(kind, distinct, distinct)  # five tokens with one expert are too rare to count
        return cls(kind, top_k, top_k * -(-tokens // SERVED))
