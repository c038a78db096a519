"""Plan: which route a call takes, fixed when the layer is admitted.

A plan is a value. It never reads a flag, the environment or a tensor's contents again; everything
that depends on routes (buffers, logs, cache keys, dispatch) asks it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Decision, Plain
from sm70_moe.facts import CallFacts
from sm70_moe.layout import BankLayout
from sm70_moe.plan.memory import Memory, memory_of
from sm70_moe.policy import CallConditions, Route

DIGEST_VERSION = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The frozen result of an admission.

    `routes` are tried in order; the last one takes any call. An unsupported layer has none.
    """

    admission: Admission
    routes: tuple[Route, ...] = field(init=False)
    memory: Memory | None = field(init=False)
    digest: str = field(init=False)
    _first: tuple[int, ...] = field(init=False, repr=False)
    _open: tuple[tuple[Route, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        fix = object.__setattr__  # the only way to derive fields of a frozen dataclass
        fix(self, "routes", self.admission.routes)
        fix(self, "memory", memory_of(self.admission))
        first, by_start = token_table(self.admission.routes)
        fix(self, "_first", first)
        fix(self, "_open", by_start)
        fix(self, "digest", digest_of(self.fields()))

    @property
    def layer(self) -> str:
        return self.admission.facts.layer

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.admission.decisions

    @property
    def layout(self) -> BankLayout | None:
        return self.admission.layout

    @property
    def supported(self) -> bool:
        return bool(self.routes)

    def route(self, call: CallFacts) -> Route | None:
        """The route of this call; None for a call without tokens.

        Reads tokens, dtypes, shapes, strides and alignment only. Raises LookupError for a layer
        that no route can run.
        """
        tokens = call.x.shape[0]
        if not tokens:
            return None
        for route in self._open[bisect_right(self._first, tokens)]:
            if route.call is None or accepts(route.call, call):
                return route
        raise LookupError(f"{self.layer}: no route takes {tokens} tokens; the layer is unsupported")

    def reachable(self, tokens: int) -> tuple[Route, ...]:
        """Every route that some call of this many tokens may take, in the order they are tried."""
        return self._open[bisect_right(self._first, tokens)] if tokens > 0 else ()

    def fields(self) -> dict[str, Plain]:
        """What the digest is made of: equal on ranks and layers that run alike.

        The layer's name and index, the rank and the device's number are left out: they differ
        where the plans are the same. The device's architecture stands by itself, whoever told it.
        """
        admission = self.admission
        own = ("layer", "index", "tensor_rank", "expert_rank", "device", "architecture")
        return {
            "version": DIGEST_VERSION,
            "policy": admission.policy.digest,
            "facts": {k: v for k, v in admission.facts.record().items() if k not in own},
            "flags": {name: flag.state.value for name, flag in admission.flags.items()},
            "outcomes": {d.feature: d.outcome.value for d in admission.decisions},
            "routes": [f"{r.name} {r.backend} {r.tokens.first}-{r.tokens.last or ''}" for r in self.routes],
            "layout": admission.layout.tag if admission.layout else None,
            "resident_tokens": admission.resident_tokens,
            "architecture": admission.device.architecture if admission.device else None,
            "build": admission.machine.build.id if admission.machine.build else None,
        }


def accepts(conditions: CallConditions, call: CallFacts) -> bool:
    """Do dtypes, strides, alignment and, where given, shapes of a call meet a route's conditions?"""
    x, ids, weights, out = call.x, call.ids, call.weights, call.out
    if x.dtype != conditions.x or ids.dtype != conditions.ids or weights.dtype != conditions.weights:
        return False
    if conditions.contiguous and not (
        x.contiguous and ids.contiguous and weights.contiguous and (out is None or out.contiguous)
    ):
        return False
    least = conditions.alignment
    if x.alignment < least or (out is not None and out.alignment < least):
        return False
    return (
        (conditions.x_shape is None or x.shape == conditions.x_shape)
        and (conditions.ids_shape is None or ids.shape == conditions.ids_shape)
        and (conditions.weights_shape is None or weights.shape == conditions.weights_shape)
    )


def token_table(routes: tuple[Route, ...]) -> tuple[tuple[int, ...], tuple[tuple[Route, ...], ...]]:
    """Token counts at which the open routes change, and the routes before and after each."""
    starts = {1, *(r.tokens.first for r in routes), *(r.tokens.last + 1 for r in routes if r.tokens.last)}
    first = tuple(sorted(starts))
    return first, ((), *(tuple(open_at(routes, tokens)) for tokens in first))


def open_at(routes: tuple[Route, ...], tokens: int) -> Iterator[Route]:
    for route in routes:
        if route.tokens.first <= tokens and (route.tokens.last is None or tokens <= route.tokens.last):
            yield route


def digest_of(fields: dict[str, Plain]) -> str:
    """SHA-256 over canonical JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two plans differ; `field` is a dotted path into `Plan.fields()`."""

    field: str
    first: Plain
    second: Plain


def compare_plans(first: Plan, second: Plan) -> tuple[Difference, ...]:
    """Every field that makes the two digests differ, named; empty if they are equal."""
    return tuple(differences("", first.fields(), second.fields()))


def differences(path: str, first: Plain, second: Plain) -> Iterator[Difference]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in sorted({*first, *second}):
            yield from differences(f"{path}.{key}" if path else key, first.get(key), second.get(key))
    elif first != second:
        yield Difference(path, first, second)
