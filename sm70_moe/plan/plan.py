"""Plan: which route a call takes, fixed when the layer is admitted.

A plan is a value. It never reads a flag, the environment or a tensor's contents again; everything
that depends on routes (buffers, logs, cache keys, dispatch) asks it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Decision, Plain
from sm70_moe.facts import CallFacts
from sm70_moe.kernels.build.images import Choice
from sm70_moe.kernels.declared import BUILT_IN
from sm70_moe.kernels.native.tactics import below
from sm70_moe.kernels.protocol import Broken
from sm70_moe.layout import BankLayout
from sm70_moe.living import LivingValue
from sm70_moe.plan.memory import Memory, memory_of
from sm70_moe.plan.planned import PlannedRoute
from sm70_moe.plan.specialised import layer_of, sizes_of
from sm70_moe.policy import Route

DIGEST_VERSION = 2

Tactics = tuple[tuple[int, str], ...]
"""`Choice.tactics`."""


@dataclass(frozen=True, slots=True)
class Plan(LivingValue):
    """The frozen result of an admission.

    `routes` are tried in order; the last one takes any call. An unsupported layer has none. `tactics` are what
    tuning chose, by backend: the largest number of tokens of a bucket, and how its calls are run.
    """

    admission: Admission
    tactics: Mapping[str, Tactics] = field(default_factory=dict)
    routes: tuple[PlannedRoute, ...] = field(init=False)
    memory: Memory | None = field(init=False)
    digest: str = field(init=False)
    _first: tuple[int, ...] = field(init=False, repr=False)
    _open: tuple[tuple[PlannedRoute, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        fix = object.__setattr__  # the only way to derive fields of a frozen dataclass
        fix(self, "routes", planned(self.admission, self.tactics))
        fix(self, "memory", memory_of(self.admission))
        first, by_start = token_table(self.routes)
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

    def route(self, call: CallFacts) -> PlannedRoute | None:
        """The route of this call; None for a call without tokens.

        Reads tokens, dtypes, shapes, strides and alignment only. Raises LookupError for a layer
        that no route can run.
        """
        tokens = call.x.shape[0]
        if not tokens:
            return None
        for route in self._open[bisect_right(self._first, tokens)]:
            if route.takes(call):
                return route
        raise LookupError(f"{self.layer}: no route takes {tokens} tokens; the layer is unsupported")

    @property
    def token_starts(self) -> tuple[int, ...]:
        """The token counts, ascending from 1, from which on other routes are open."""
        return self._first

    def reachable(self, tokens: int) -> tuple[PlannedRoute, ...]:
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
            "routes": [str(route) for route in self.routes],
            "layout": admission.layout.tag if admission.layout else None,
            "resident_tokens": admission.resident_tokens,
            "architecture": admission.device.architecture if admission.device else None,
            "build": admission.machine.build.id if admission.machine.build else None,
        }


def planned(admission: Admission, tactics: Mapping[str, Tactics]) -> tuple[PlannedRoute, ...]:
    """The admitted routes, each with the version of its kernels and how they are launched."""
    build, sizes, layer = admission.machine.build, sizes_of(admission), layer_of(admission)

    def of(route: Route) -> PlannedRoute:
        backend = admission.machine.backends[route.backend]
        assert not isinstance(backend, Broken)  # an admitted route's backend has loaded
        ours = build is not None and backend.native and route.backend in BUILT_IN
        choice = build.choice(route.backend, sizes, layer) if build is not None and ours else Choice()
        if tuned := tuple(within(route, tactics.get(route.backend, ()))):
            choice = replace(choice, tactics=tuned)
        return PlannedRoute(route, choice, admission.abilities.get(route.backend))

    return tuple(map(of, admission.routes))


def within(route: Route, tactics: Tactics) -> Iterator[tuple[int, str]]:
    """Those of buckets in which the route has calls."""
    for bucket, tactic in tactics:
        if route.tokens.first <= bucket and (route.tokens.last is None or below(bucket) < route.tokens.last):
            yield bucket, tactic


def token_table(routes: tuple[PlannedRoute, ...]) -> tuple[tuple[int, ...], tuple[tuple[PlannedRoute, ...], ...]]:
    """Token counts at which the open routes change, and the routes before and after each."""
    starts = {1, *(r.tokens.first for r in routes), *(r.tokens.last + 1 for r in routes if r.tokens.last)}
    first = tuple(sorted(starts))
    return first, ((), *(tuple(open_at(routes, tokens)) for tokens in first))


def open_at(routes: tuple[PlannedRoute, ...], tokens: int) -> Iterator[PlannedRoute]:
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
