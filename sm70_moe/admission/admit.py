"""admit(): weighs policy, settings, layer and machine, once per layer.

Pure: four values in, one value out; nothing is read, written or raised for a refusal. Every
independent check runs, so that a refusal lists all of its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sm70_moe.admission.checks.contract import contract_findings
from sm70_moe.admission.checks.layer import look_at
from sm70_moe.admission.checks.machine import backend_findings, layer_device, native_findings, option_finding
from sm70_moe.admission.checks.operator import layer_list
from sm70_moe.admission.checks.options import Wanted, native_option
from sm70_moe.decision import Decision, Finding, Outcome, Plain, Reason, Status
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.protocol import Broken
from sm70_moe.layout import BankLayout, Metadata
from sm70_moe.machine.devices import Device
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import Check, Feature, Policy, Route
from sm70_moe.settings.flags import FlagState, FlagValue
from sm70_moe.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Admission:
    """Everything that was decided for one layer, and what it was decided from.

    `routes` are the admitted ones in the policy's order; they are empty, and `layout` is None,
    where not even the last route can run the layer.
    """

    policy: Policy
    settings: Settings
    facts: LayerFacts
    decisions: tuple[Decision, ...]
    routes: tuple[Route, ...]
    layout: BankLayout | None
    flags: Mapping[str, FlagValue]
    device: Device | None
    machine: Machine
    resident_tokens: int

    @property
    def refused(self) -> tuple[Decision, ...]:
        """Decisions that an explicit `1` turned into errors."""
        return tuple(d for d in self.decisions if d.outcome is Outcome.REFUSED)

    @property
    def supported(self) -> bool:
        """Can any route run the layer?"""
        return self.layout is not None

    @property
    def last_resort(self) -> Decision:
        """The decision over the last route, which says why a layer is unsupported."""
        return self.decision(self.policy.routes[-1].name)

    def decision(self, feature: str) -> Decision:
        """The decision over a feature or an unflagged route; KeyError names one that is not there."""
        for decision in self.decisions:
            if decision.feature == feature:
                return decision
        raise KeyError(feature)


NO_OBJECTIONS: Mapping[str, Finding] = MappingProxyType({})


def admit(
    policy: Policy,
    settings: Settings,
    facts: LayerFacts,
    machine: Machine,
    objections: Mapping[str, Finding] = NO_OBJECTIONS,
) -> Admission:
    """Decide every feature and every unflagged route of the policy for one layer.

    `objections` are findings from elsewhere, by feature: other ranks have some.
    Raises SettingsError if a flag of the policy has a value that is not accepted.
    """
    case = _Case(policy, settings, facts, machine, objections)
    for route in policy.routes:  # first: a feature is worth nothing on a layer that has no last resort
        if route.feature is None:
            case.decisions[route.name] = case.unflagged(route)
    for name in in_order_of_need(policy.features):
        case.decisions[name] = case.feature(name)
    admitted = case.admitted_routes()
    return Admission(
        policy=policy,
        settings=settings,
        facts=facts,
        decisions=(*(case.decisions[name] for name in case.reading_order()), *case.undeclared()),
        routes=admitted,
        layout=case.layout(admitted),
        flags=case.flags,
        device=case.device,
        machine=machine,
        resident_tokens=resident_tokens(settings.persistent_tokens, facts),
    )


RESIDENT_CAP = 32
"""Resident scratch never serves more tokens than this (CONTRACT 2)."""


def resident_tokens(override: int, facts: LayerFacts) -> int:
    """Tokens that the resident scratch is sized for; the cap where the engine did not say."""
    derived = (facts.max_sequences or RESIDENT_CAP) * (facts.speculative_width or 1)
    return min(RESIDENT_CAP, override or derived)


def in_order_of_need(features: Mapping[str, Feature]) -> tuple[str, ...]:
    """Feature names, each after those that it needs, options last; policy validation has excluded cycles."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in done:
            for need in features[name].needs:
                visit(need)
            done[name] = None

    for name in sorted(features, key=lambda name: features[name].kind == "option"):
        visit(name)
    return tuple(done)


class _Case:
    """One layer before the bench: inputs, and the decisions so far."""

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        facts: LayerFacts,
        machine: Machine,
        objections: Mapping[str, Finding],
    ) -> None:
        self.policy, self.settings, self.machine, self.objections = policy, settings, machine, objections
        self.flags = settings.flags(policy)
        self.exclusion = settings.layer_exclusion(facts.index)
        self.layer = look_at(facts)
        self.device_finding, self.device = layer_device(facts, machine)
        self.base = {finding.check: finding for finding in self.layer.base}
        self.contract = contract_findings(policy.contract, self.layer, self.device)
        self.decisions: dict[str, Decision] = {}

    def feature(self, name: str) -> Decision:
        feature, flag = self.policy.features[name], self.flags[name]
        if flag.state is FlagState.OFF:
            reason = Reason.FLAG_OFF_BY_DEFAULT if flag.source == "unset" else Reason.FLAG_OFF
            off = Finding.failed("flag", reason, "auto or 1", "off" if flag.source == "unset" else "0")
            return Decision(name, feature.kind, Outcome.OFF, (off,), flag.state.value, flag.source)
        findings = (
            *layer_list(feature, self.exclusion),
            *self.against_contract(feature.checks),
            *(self.need(other) for other in feature.needs),
            *self.to_run(name, feature),
            *((self.objections[name],) if name in self.objections else ()),
        )
        last = self.policy.routes[-1].name
        if all_passed(findings) and not self.decisions[last].admitted:
            findings = (*findings, self.need(last))
        outcome = self.outcome(findings, flag.state)
        return Decision(name, feature.kind, outcome, findings, flag.state.value, flag.source)

    def against_contract(self, checks: tuple[Check, ...]) -> tuple[Finding, ...]:
        """The base findings, each replaced where the contract is stricter about the same thing."""
        stricter = (self.contract[check] for check in checks if check in self.contract)
        return tuple({**self.base, **{finding.check: finding for finding in stricter}}.values())

    def to_run(self, name: str, feature: Feature) -> tuple[Finding, ...]:
        """What the machine must have for this feature."""
        routes = [route for route in self.policy.routes if route.feature == name]
        if feature.kind == "option":
            backends = tuple(dict.fromkeys(route.backend for route in self.policy.routes))
            honoured = option_finding(name, backends, self.machine)
            if not feature.native:
                return (honoured,)
            return (honoured, *native_option(name, self.wanted(), self.device_finding, self.device, self.machine))
        findings: list[Finding] = []
        for backend in dict.fromkeys(route.backend for route in routes):
            findings += self.native(backend, feature.native)
            findings += self.backend(backend)
        return tuple(findings)

    def wanted(self) -> Wanted:
        """Sizes and layout of the layer's banks, as far as they are decided; options are decided last."""
        facts = self.layer.facts
        return Wanted(facts.hidden, facts.intermediate_per_rank, facts.top_k, self.banks())

    def backend(self, name: str) -> tuple[Finding, ...]:
        return backend_findings(name, self.policy.routes[-1].order, self.layer.facts, self.machine)

    def native(self, backend: str, declared: bool = False) -> tuple[Finding, ...]:
        """Machine code, for a feature that is declared native or a backend that says so itself."""
        there = self.machine.backends.get(backend)
        if not declared and (there is None or isinstance(there, Broken) or not there.native):
            return ()
        return native_findings(backend, self.device_finding, self.device, self.machine)

    def unflagged(self, route: Route) -> Decision:
        findings = (*self.layer.base, *self.native(route.backend), *self.backend(route.backend))
        stopped = Outcome.UNSUPPORTED if route is self.policy.routes[-1] else Outcome.FELL_BACK
        outcome = Outcome.ADMITTED if all_passed(findings) else stopped
        return Decision(route.name, "route", outcome, findings)

    def undeclared(self) -> tuple[Decision, ...]:
        """Flags that the policy does not have: their own decisions, since no feature carries them."""
        has: Plain = list(self.policy.features)
        lenient = self.policy.on.mixed_model == "admit-the-rest"
        return tuple(
            Decision(
                name,
                "flag",
                Outcome.OFF if flag.state is FlagState.OFF else Outcome.FELL_BACK if lenient else Outcome.REFUSED,
                (
                    Finding.failed(
                        "flag", Reason.FLAG_UNDECLARED, has, name, f"policy {self.policy.name} has other flags"
                    ),
                ),
                flag.state.value,
                flag.source,
            )
            for name, flag in self.settings.undeclared(self.policy).items()
        )

    def need(self, other: str) -> Finding:
        decision = self.decisions[other]
        if decision.admitted:
            return Finding.passed(f"needs {other}", "admitted")
        return Finding.failed(f"needs {other}", Reason.NEED_NOT_ADMITTED, "admitted", decision.outcome.value)

    def outcome(self, findings: tuple[Finding, ...], state: FlagState) -> Outcome:
        if all_passed(findings):
            return Outcome.ADMITTED
        if state is not FlagState.REQUIRE:
            return Outcome.FELL_BACK
        tolerated = self.policy.on.mixed_model == "admit-the-rest" and self.odd_layer(findings)
        return Outcome.FELL_BACK if tolerated else Outcome.REFUSED

    def odd_layer(self, findings: tuple[Finding, ...]) -> bool:
        """Is it only this layer that differs, so that other layers of the model may still be admitted?"""
        for finding in findings:
            if finding.status is Status.FAIL and finding.reason is Reason.NEED_NOT_ADMITTED:
                need = self.decisions[finding.check.removeprefix("needs ")]
                if need.outcome is Outcome.OFF or not self.odd_layer(need.findings):
                    return False
            elif finding.status not in (Status.PASS, Status.SKIPPED) and finding.reason not in LAYER_REASONS:
                return False
        return True

    def admitted_routes(self) -> tuple[Route, ...]:
        if not self.decisions[self.policy.routes[-1].name].admitted:
            return ()
        return tuple(r for r in self.policy.routes if self.decisions[r.feature or r.name].admitted)

    def layout(self, routes: tuple[Route, ...]) -> BankLayout | None:
        """The one layout that all admitted routes read: a layer's weights are kept once."""
        return self.banks() if routes else None

    def banks(self) -> BankLayout | None:
        """What the features that were admitted so far make of the banks; every route reads the same order."""
        if self.layer.grouping is None:
            return None
        decided = ((feature, self.decisions.get(name)) for name, feature in self.policy.features.items())
        admitted = [feature for feature, decision in decided if decision and decision.admitted]
        wanted = self.policy.contract.weights.prepared_group
        bound = any(Check.PREPARED_GROUP in f.checks for f in admitted)
        metadata = next((Metadata(f.metadata) for f in admitted if f.metadata), Metadata.FOUR_BYTE)
        return BankLayout(
            order=self.policy.routes[-1].order,
            metadata=metadata,
            group=wanted if wanted and bound else self.layer.grouping.widest,
            interleaved=any(f.interleaves_w13 for f in admitted),
            batched=any(f.batches for f in admitted),
        )

    def reading_order(self) -> tuple[str, ...]:
        """Routes as they are tried, then layouts and options."""
        routes = [route.feature or route.name for route in self.policy.routes]
        return tuple(dict.fromkeys([*routes, *self.policy.features]))


def all_passed(findings: tuple[Finding, ...]) -> bool:
    passed = Status.PASS  # a list and a local name: this is a tenth of an admission's time otherwise
    return not [finding for finding in findings if finding.status is not passed]


LAYER_REASONS = frozenset(
    {
        Reason.LAYER_DENIED,
        Reason.LAYER_NOT_ALLOWED,
        Reason.FORMAT,
        Reason.BITS,
        Reason.ZERO_POINT,
        Reason.EXPERTS,
        Reason.TOP_K,
        Reason.HIDDEN,
        Reason.INTERMEDIATE,
        Reason.GROUP_SIZE,
        Reason.PREPARED_GROUP,
        Reason.ACTIVATION,
        Reason.KERNEL_SIZES,
        Reason.GROUP_INDIVISIBLE,
        Reason.SHARD_UNEVEN,
        Reason.SHARD_CUTS_GROUP,
    }
)
"""Reasons that lie in one layer, not in the machine or in what the operator set for all of them."""
