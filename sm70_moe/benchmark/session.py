"""A run from policy to result: admission, banks, measurement, and what the device was like meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sm70_moe.admission.admit import admit
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.benchmark.measurement import Findings, Limit, first_line, measure
from sm70_moe.benchmark.native import finding_text
from sm70_moe.benchmark.place import Place
from sm70_moe.benchmark.protocol import Protocol
from sm70_moe.benchmark.result import Result, Skipped
from sm70_moe.benchmark.setup import Setup
from sm70_moe.benchmark.weights import how_many
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, PolicyError
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.native.driver import Driver
from sm70_moe.kernels.native.launch import Launcher
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.machine.machine import Machine
from sm70_moe.plan.memory import bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import Policy
from sm70_moe.runtime.kernels import Kernels
from sm70_moe.runtime.refusal import refusal
from sm70_moe.settings.settings import Settings

Tell = Callable[[str], None]


@dataclass(slots=True)
class Watchman:
    """The device's state before and after, and every reason for lower clocks that was seen between."""

    state: Callable[[], Mapping[str, Plain]]
    before: Mapping[str, Plain] = field(default_factory=dict)
    after: Mapping[str, Plain] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def look(self) -> Mapping[str, Plain]:
        found = self.state()
        reasons = found.get("held_down_by")
        self.seen.update(map(str, reasons) if isinstance(reasons, list) else ())
        return found

    def record(self) -> dict[str, Plain]:
        return {"before": dict(self.before), "after": dict(self.after), "held_down_by": sorted(self.seen)}


SIZES = ("hidden", "intermediate", "experts", "top_k")


def facts_of_contract(policy: Policy, device: str) -> LayerFacts:
    """A layer just as the contract has it. Raises PolicyError for one that leaves sizes open."""
    if missing := [name for name in SIZES if getattr(policy.contract, name) is None]:
        raise PolicyError([f"{policy.name}: its contract leaves {', '.join(missing)} open; a benchmark needs sizes"])
    return contract_facts(policy, device=device)


def planned(policy: Policy, facts: LayerFacts, settings: Settings, machine: Machine) -> Plan:
    """The plan of a layer of these sizes. Raises AdmissionRefused for a `1` that cannot be honoured, BackendError
    for a layer that nothing can run here."""
    if missing := [name for name in SIZES if getattr(facts, name) is None]:
        raise BackendError(f"{facts.layer}: {', '.join(missing)} unknown; a benchmark needs sizes")
    plan = Plan(admit(policy, settings, facts, machine))
    if refused := plan.admission.refused:
        raise refusal(plan.admission, refused)
    if not plan.supported:
        texts = "; ".join(map(finding_text, plan.admission.last_resort.obstacles))
        raise BackendError(f"policy {policy.name}: no route can run its layers: {texts}")
    return plan


def opened(device: str, settings: Settings, driver: Driver | None = None) -> Launcher | str:
    """The kernels of the measurement itself on this device, or why there are none."""
    try:
        launcher = Launcher.open(device, settings.kernels, driver)
        if launcher.architecture not in launcher.images.of_sources(["roofline"]):
            return f"the build has no image of the read-only kernels for {launcher.architecture}"
    except BackendError as error:
        return str(error)
    return launcher


def run(plan: Plan, protocol: Protocol, place: Place, launcher: Launcher | str, tell: Tell) -> Result:
    """Measure everything. Raises BackendError where not even two banks fit."""
    layout, shape, findings = plan.layout, bank_shape(plan.admission), Findings()
    assert layout is not None  # the plan is supported
    assert shape is not None
    top_k, limit = plan.admission.facts.top_k or 0, Limit(protocol.seconds)
    watchman = Watchman(place.state)

    def told(what: str) -> None:
        watchman.look()
        tell(what)

    with place.current():
        gpu, watchman.before = place.facts(), watchman.look()
        layouts = {kind: replace(layout, metadata=Metadata(kind)) for kind in protocol.metadata}
        counts = {kind: how_many(place.free(), own, shape, protocol.banks) for kind, own in layouts.items()}
        for kind, own in layouts.items():
            try:
                told(f"{kind}: compiling kernels")
                limit.check()
                made = with_kernels(plan, own, told)
                told(f"{kind}: filling {counts[kind]} banks")
                limit.check()
                one_kind(made, own, shape, counts[kind], protocol, place, launcher, findings, told, limit)
            except (BackendError, RuntimeError) as error:  # as after a kernel that broke the context
                findings.skipped.append(Skipped("everything else", first_line(error), metadata=kind))
            with suppress(RuntimeError):  # the same
                place.release()
        watchman.after = watchman.look()
    return Result(
        gpu=gpu,
        build=plan.admission.machine.build.id if plan.admission.machine.build else None,
        policy=plan.admission.policy.name,
        policy_digest=plan.admission.policy.digest,
        geometry=Geometry(shape.hidden, shape.intermediate, shape.experts, top_k, layout.group).record(),
        protocol=protocol.record() | {"banks": counts, "separator": separator_of(launcher)},
        rows=tuple(findings.rows),
        skipped=tuple(findings.skipped),
        host=tuple(findings.host),
        extra={"state": watchman.record()},
    )


def one_kind(
    plan: Plan,
    layout: BankLayout,
    shape: BankShape,
    banks: int,
    protocol: Protocol,
    place: Place,
    launcher: Launcher | str,
    findings: Findings,
    tell: Tell,
    limit: Limit,
) -> None:
    """A function of its own, so that one kind's banks are gone before the next one's are made."""
    setup = Setup.make(plan, layout, shape, place.device, banks, protocol.seed, launcher, place.stream)
    measure(setup, protocol, place.watch, findings, tell, limit)


def with_kernels(plan: Plan, layout: BankLayout, tell: Tell) -> Plan:
    """The plan on these banks, with the kernels that an engine would have compiled for it; `tell` hears of both."""

    def event(name: str, level: str = "info", **fields: Plain) -> None:
        tell(f"{name}: {fields.get('text', '')}")

    return Kernels(event).settle(Plan(replace(plan.admission, layout=layout)))


def separator_of(launcher: Launcher | str) -> str:
    """What writes ids and router weights: the separating kernel, or two copies where it cannot run."""
    return "copies" if isinstance(launcher, str) else "kernel"
