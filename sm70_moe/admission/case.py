"""Case: one layer before the bench, and the decisions so far.

Features are decided in order of need, options last. What the admitted ones make of the banks must be
read by every admitted route: a route that does not read them gets that as one more finding, and all
is decided again, until nothing is left to object to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sm70_moe.admission.checks.contract import contract_findings
from sm70_moe.admission.checks.layer import look_at
from sm70_moe.admission.checks.machine import (
    backend_findings,
    layer_device,
    native_findings,
    option_finding,
    plugin_findings,
    spot_findings,
)
from sm70_moe.admission.checks.operator import layer_list
from sm70_moe.admission.checks.options import Wanted, native_option
from sm70_moe.admission.negotiation import Banks, negotiate
from sm70_moe.decision import Decision, Finding, Outcome, Reason, Scope, Status
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import BUILT_IN, SOURCES
from sm70_moe.kernels.protocol import Broken
from sm70_moe.layout import BankLayout
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import Check, Feature, Policy, Route
from sm70_moe.settings.flags import FlagState
from sm70_moe.settings.settings import Settings


class Case:
    """Inputs, and the decisions so far."""

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        facts: LayerFacts,
        machine: Machine,
        objections: Mapping[str, Finding],
    ) -> None:
        self.policy, self.settings, self.machine = policy, settings, machine
        self.objections = {name: (finding,) for name, finding in objections.items()}
        self.flags = settings.flags(policy)
        self.exclusion = settings.layer_exclusion(facts.index)
        self.layer = look_at(facts, settings.assume)
        self.foreign = self.layer.foreign
        self.device_finding, self.device = layer_device(facts, machine)
        self.architecture = self.device.architecture if self.device else None
        self.base = {finding.check: finding for finding in self.layer.base}
        self.contract = contract_findings(policy.contract, self.layer, self.device)
        self.decisions: dict[str, Decision] = {}
        self.abilities: dict[str, Capability | None] = {}
        self._run: dict[str, tuple[Finding, ...]] = {}
        self._against: dict[tuple[Check, ...], tuple[Finding, ...]] = {}

    def decide(self) -> tuple[tuple[Route, ...], BankLayout | None]:
        """Decide everything; the routes that are left, and the one layout that all of them read."""
        order = self.policy.order_of_need
        while True:
            self.decisions.clear()
            for route in self.policy.routes:  # first: a feature is worth nothing without a last resort
                if route.feature is None:
                    self.decisions[route.name] = self.unflagged(route)
            for name in order:
                self.decisions[name] = self.feature(name)
            routes = self.admitted_routes()
            found = negotiate(self.wish(), routes, self.abilities)
            if not found.misfits:
                return routes, found.layout
            for name, findings in found.misfits:
                self.objections[name] = (*self.objections.get(name, ()), *findings)

    def wish(self) -> Banks:
        """What the features that were admitted so far make of the banks."""
        decided = ((feature, self.decisions.get(name)) for name, feature in self.policy.features.items())
        return Banks.of(self.policy, self.layer, [f for f, decision in decided if decision and decision.admitted])

    def feature(self, name: str) -> Decision:
        feature, flag = self.policy.features[name], self.flags[name]
        if flag.state is FlagState.OFF:
            reason = Reason.FLAG_OFF_BY_DEFAULT if flag.source == "unset" else Reason.FLAG_OFF
            off = Finding.failed("flag", reason, "auto or 1", "off" if flag.source == "unset" else "0")
            return Decision(name, feature.kind, Outcome.OFF, (off,), flag.state.value, flag.source)
        if self.foreign:
            found = self.against_contract(feature.checks)
            return Decision(name, feature.kind, Outcome.NOT_OURS, found, flag.state.value, flag.source)
        findings = (
            *layer_list(feature, self.exclusion),
            *self.against_contract(feature.checks),
            *[self.need(other) for other in feature.needs],
            *self.stands_in(feature, flag.state),
            *self.to_run(name, feature),
            *self.objections.get(name, ()),
        )
        last = self.policy.routes[-1].name
        passed = all_passed(findings)
        if passed and not self.decisions[last].admitted:
            findings, passed = (*findings, self.need(last)), False
        outcome = Outcome.ADMITTED if passed else self.stopped(findings, flag.state)
        return Decision(name, feature.kind, outcome, findings, flag.state.value, flag.source)

    def against_contract(self, checks: tuple[Check, ...]) -> tuple[Finding, ...]:
        """The base findings, each replaced where the contract is stricter about the same thing."""
        if checks not in self._against:  # most features of a policy insist on the same
            stricter = (self.contract[check] for check in checks if check in self.contract)
            found = {**self.base, **{finding.check: finding for finding in stricter}}
            self._against[checks] = tuple(found.values())
        return self._against[checks]

    def to_run(self, name: str, feature: Feature) -> tuple[Finding, ...]:
        """What the machine must have for this feature."""
        if feature.kind == "option":
            backends = tuple(dict.fromkeys(route.backend for route in self.policy.routes))
            honoured = option_finding(name, backends, self.machine)
            if not feature.native:
                return (honoured, *self.honoured(name, honoured))
            return (honoured, *native_option(name, self.wanted(), self.device_finding, self.device, self.machine))
        if name not in self._run:  # what a machine has does not change while a layer is decided
            found: list[Finding] = []
            for route in self.policy.routes:
                if route.feature == name:
                    found += self.route(route, feature.native)
            self._run[name] = tuple(found)
        return self._run[name]

    def honoured(self, option: str, found: Finding) -> tuple[Finding, ...]:
        """An option of a backend that runs none of the layer's routes would do nothing."""
        if found.status is not Status.PASS:
            return ()
        backends = tuple(dict.fromkeys(route.backend for route in self.admitted_routes()))
        admitted = option_finding(option, backends, self.machine)
        return () if admitted.status is Status.PASS else (replace(admitted, check="option of an admitted route"),)

    def wanted(self) -> Wanted:
        """Sizes and layout of the layer's banks, as far as they are decided; options are decided last."""
        facts = self.layer.facts
        layout = negotiate(self.wish(), self.admitted_routes(), self.abilities).layout
        return Wanted(facts.hidden, facts.intermediate_per_rank, facts.top_k, layout)

    def route(self, route: Route, native: bool = False) -> tuple[Finding, ...]:
        """Machine code for a backend that needs it, and what the backend says of the layer."""
        return (*self.native(route.backend, native), *self.backend(route))

    def backend(self, route: Route) -> tuple[Finding, ...]:
        ability, findings = backend_findings(route, self.layer, self.architecture, self.machine)
        if ability is not None and route.backend in BUILT_IN and route.backend in SOURCES:
            ability = ability.for_layer(self.layer.facts.activations)
        self.abilities[route.backend] = ability
        return findings

    def native(self, backend: str, declared: bool = False) -> tuple[Finding, ...]:
        """Machine code, for a feature that is declared native or a backend that says so itself."""
        there = self.machine.backends.get(backend)
        if not declared and (there is None or isinstance(there, Broken) or not there.native):
            return ()
        find = native_findings if backend in BUILT_IN else plugin_findings
        found = find(backend, self.device_finding, self.device, self.machine)
        return (*found, *spot_findings(backend, self.layer.facts, self.machine)) if all_passed(found) else found

    def unflagged(self, route: Route) -> Decision:
        if self.foreign:
            return Decision(route.name, "route", Outcome.NOT_OURS, self.layer.base)
        if route.name not in self._run:
            self._run[route.name] = self.route(route)
        findings = (*self.layer.base, *self._run[route.name], *self.objections.get(route.name, ()))
        stopped = Outcome.UNSUPPORTED if route is self.policy.routes[-1] else Outcome.FELL_BACK
        outcome = Outcome.ADMITTED if all_passed(findings) else stopped
        return Decision(route.name, "route", outcome, findings)

    def stands_in(self, feature: Feature, state: FlagState) -> tuple[Finding, ...]:
        """A `0` asks for the older route, not for another new one; an explicit `1` asks for this one."""
        if not feature.unless_off or state is FlagState.REQUIRE:
            return ()
        off = (other for other in feature.unless_off if self.flags[other].state is FlagState.OFF)
        return tuple(Finding.failed(f"flag {other}", Reason.FLAG_OFF, "auto or 1", "0") for other in off)

    def need(self, other: str) -> Finding:
        decision = self.decisions[other]
        if decision.admitted:
            return Finding.passed(f"needs {other}", "admitted")
        return Finding.failed(f"needs {other}", Reason.NEED_NOT_ADMITTED, "admitted", decision.outcome.value)

    def stopped(self, findings: tuple[Finding, ...], state: FlagState) -> Outcome:
        """What becomes of a feature with findings against it."""
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
            elif finding.reason and finding.status is not Status.SKIPPED and finding.reason.scope is not Scope.LAYER:
                return False
        return True

    def admitted_routes(self) -> tuple[Route, ...]:
        if not self.decisions[self.policy.routes[-1].name].admitted:
            return ()
        return tuple(r for r in self.policy.routes if r.feature is None or r.feature in self.decisions if self.taken(r))

    def taken(self, route: Route) -> bool:
        return self.decisions[route.feature or route.name].admitted


def all_passed(findings: tuple[Finding, ...]) -> bool:
    passed = Status.PASS  # a list and a local name: this is a tenth of an admission's time otherwise
    return not [finding for finding in findings if finding.status is not passed]
