"""A whole run: every kind of metadata, number of tokens and routing, and every arm on each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from sm70_moe.benchmark.arms import Arm, Ready, arms
from sm70_moe.benchmark.protocol import Protocol
from sm70_moe.benchmark.result import Host, Row, Skipped
from sm70_moe.benchmark.routing import Routing, routings
from sm70_moe.benchmark.setup import Setup
from sm70_moe.benchmark.stand import Stand
from sm70_moe.benchmark.timing import Stopwatch, Timing, all_layers, eagerly, host_time, in_graphs
from sm70_moe.benchmark.verdict import verdict
from sm70_moe.errors import BackendError
from sm70_moe.facts import CallFacts
from sm70_moe.plan.memory import backend
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.timings import EAGER

Tell = Callable[[str], None]
"""Told what is measured next."""


@dataclass(slots=True)
class Findings:
    """What a run has found so far."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    host: list[Host] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return any(row.wrong for row in self.rows)


@dataclass(frozen=True, slots=True)
class Limit:
    """When a run ends, by a clock of seconds; never without `seconds`."""

    seconds: float | None = None
    start: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic

    def check(self) -> None:
        """Raises BackendError once the time is over."""
        if self.seconds is not None and self.clock() - self.start > self.seconds:
            raise BackendError(f"no time left of {self.seconds:g} s")


def measure(
    setup: Setup, protocol: Protocol, watch: Stopwatch, findings: Findings, tell: Tell, limit: Limit | None = None
) -> None:
    """Everything on one kind of metadata, as far as the time goes."""
    limit = limit or Limit()
    for stand in stands(setup, protocol):
        place = f"{setup.layout.metadata} {stand.tokens} tokens {stand.routing.name}"
        measure_stand(stand, protocol, watch, findings, partial(told, tell, place), limit)
    for tokens in protocol.tokens:
        tell(f"{setup.layout.metadata} {tokens} tokens: host")
        try:
            limit.check()
            findings.host.append(host(setup, tokens, protocol, watch))
        except (BackendError, RuntimeError) as error:
            kind, reason = setup.layout.metadata.value, first_line(error)
            findings.skipped.append(Skipped("host time", reason, metadata=kind, tokens=tokens))


def told(tell: Tell, place: str, arm: str) -> None:
    tell(f"{place}: {arm}")


def stands(setup: Setup, protocol: Protocol) -> Iterator[Stand]:
    banks, experts = len(setup.banks), setup.shape.experts
    for tokens in protocol.tokens:
        for name in routings(tokens, protocol.routings):
            routing = Routing.make(name, protocol.layers, banks, tokens, setup.top_k, experts, protocol.seed)
            yield Stand(setup, routing, protocol.seed)


def measure_stand(
    stand: Stand, protocol: Protocol, watch: Stopwatch, findings: Findings, tell: Tell, limit: Limit
) -> None:
    """Every arm on one stand."""
    found: list[Row] = []
    for arm in arms(stand, found):
        tell(f"{arm.name} {arm.launch} {arm.part}" + (f" {arm.shape}" if arm.shape else ""))
        try:
            limit.check()
            found.append(row_of(stand, arm, protocol, watch))
        except (BackendError, RuntimeError) as error:  # RuntimeError: torch, CUDA, no memory left
            reason = skipped(stand, arm, first_line(error))
            if reason not in findings.skipped:  # the roofline's shapes fail alike
                findings.skipped.append(reason)
    findings.rows += found


def row_of(stand: Stand, arm: Arm, protocol: Protocol, watch: Stopwatch) -> Row:
    """Time and check one arm. Raises BackendError or RuntimeError for one that does not run."""
    ready = arm.ready(stand)
    own = replace(protocol, replays=ready.replays or protocol.replays)
    layers, launch = ready.layers or stand.routing.layers, arm.launch
    all_layers(ready.layer, layers)()  # whatever happens once, happens now
    watch.wait()
    try:
        timing = in_graphs(watch, ready.layer, layers, own)
    except RuntimeError:
        if not ready.may_be_eager:
            raise
        timing, launch = eager(ready, layers, own, watch), EAGER
    distinct = stand.routing.mean_distinct(layers)
    return Row.of(
        timing.samples,
        arm=arm.name,
        launch=launch,
        part=arm.part,
        metadata=stand.setup.layout.metadata.value,
        tokens=stand.tokens,
        routing=stand.routing.name,
        distinct=distinct,
        bytes=round(distinct * arm.bytes_each),
        shape=arm.shape,
        layers=layers,
        verdict=verdict(stand, arm, ready, layers, timing.again, watch),
    )


def eager(ready: Ready, layers: int, protocol: Protocol, watch: Stopwatch) -> Timing:
    watch.wait()
    return eagerly(watch, ready.layer, layers, protocol)


def skipped(stand: Stand, arm: Arm, reason: str) -> Skipped:
    metadata, routing = stand.setup.layout.metadata.value, stand.routing.name
    return Skipped(arm.name, reason, arm.launch, arm.part, metadata, stand.tokens, routing)


def first_line(error: Exception) -> str:
    """CUDA's errors go on with advice for developers."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def host(setup: Setup, tokens: int, protocol: Protocol, watch: Stopwatch) -> Host:
    """Host time of one eager call of the layer as an engine has it, into a given output."""
    plan, hidden = setup.plan, setup.shape.hidden
    runs = {r.backend: backend(plan.admission, r.backend) for r in plan.routes}
    layer = MoELayer(plan, setup.bank(0), runs)
    routing = Routing.make("uniform", 1, 1, tokens, setup.top_k, setup.shape.experts, protocol.seed)
    stand = Stand(setup, routing, protocol.seed)
    call = stand.inputs(0)
    samples = host_time(lambda: layer(call.x, call.ids, call.weights, stand.out), watch.wait)
    route = plan.route(CallFacts.usual(tokens, hidden, setup.top_k))
    return Host(tokens, setup.layout.metadata.value, route.name if route else "", min(samples), samples)
