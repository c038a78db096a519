"""admit(): weighs policy, settings, layer and machine, once per layer.

Pure: four values in, one value out; nothing is read, written or raised for a refusal. Every
independent check runs, so that a refusal lists all of its reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sm70_moe.admission.case import Case
from sm70_moe.admission.undeclared import undeclared
from sm70_moe.decision import Decision, Finding, Outcome
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.capability import Capability
from sm70_moe.layout import BankLayout
from sm70_moe.living import LivingValue
from sm70_moe.machine.devices import Device
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import Policy, Route
from sm70_moe.settings.flags import FlagValue
from sm70_moe.settings.parsing import MOST_RESIDENT_TOKENS
from sm70_moe.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Admission(LivingValue):
    """Everything that was decided for one layer, and what it was decided from.

    `abilities` are what each route's backend said that it can do there; `objections` came from
    elsewhere, and hold for whoever decides the layer again.

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
    abilities: Mapping[str, Capability | None] = field(default_factory=dict)
    objections: Mapping[str, Finding] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[Decision, ...]:
        """Decisions that an explicit `1` turned into errors."""
        return tuple(d for d in self.decisions if d.outcome is Outcome.REFUSED)

    @property
    def foreign(self) -> bool:
        """Is the layer not quantised, and so the engine's own?"""
        return self.last_resort.outcome is Outcome.NOT_OURS

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
    others: Iterable[Policy] = (),
) -> Admission:
    """Decide every feature and every unflagged route of the policy for one layer.

    `objections` are findings from elsewhere, by feature or route: other ranks have some. `others` are
    policies that were not chosen: a flag that only they have is answered with the nearest of them.
    Raises SettingsError if a flag of the policy has a value that is not accepted.
    """
    case = Case(policy, settings, facts, machine, objections)
    routes, layout = case.decide()
    return Admission(
        policy=policy,
        settings=settings,
        facts=facts,
        decisions=(*(case.decisions[name] for name in policy.reading_order), *undeclared(case, others)),
        routes=routes,
        layout=layout,
        flags=case.flags,
        device=case.device,
        machine=machine,
        resident_tokens=resident_tokens(settings.persistent_tokens, facts),
        abilities=case.abilities,
        objections=objections,
    )


def resident_tokens(override: int, facts: LayerFacts) -> int:
    """Tokens that the resident scratch is sized for; the cap where the engine did not say."""
    derived = (facts.max_sequences or MOST_RESIDENT_TOKENS) * (facts.speculative_width or 1)
    return min(MOST_RESIDENT_TOKENS, override or derived)
