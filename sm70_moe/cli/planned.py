"""What a policy would do on a GPU that need not be there: the banks that it makes, the routes that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from sm70_moe.admission.admit import admit
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.cli.pretence import GPU, with_gpu
from sm70_moe.facts import CallFacts
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.layout import Metadata
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import Device
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import probe
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import Policy
from sm70_moe.prediction.readbuild import BACKENDS
from sm70_moe.settings.settings import Settings

PRETENDED = "pretended"


@dataclass(frozen=True, slots=True)
class Planned:
    """A policy's plan with no flag set, for a layer that meets its contract, on a GPU where everything is built."""

    policy: Policy
    plan: Plan

    @property
    def metadata(self) -> Metadata:
        """Kind of the banks' metadata; 4-byte where no route can run the layer."""
        return self.plan.layout.metadata if self.plan.layout else Metadata.FOUR_BYTE

    @property
    def why(self) -> str:
        """Which feature makes the metadata so, or that none does."""
        made = (name for name, feature in self.policy.features.items() if feature.metadata == self.metadata)
        name = next((n for n in made if self.plan.admission.decision(n).admitted), None)
        return f"{name} is {self.plan.admission.flags[name].state}" if name else "no admitted feature changes them"

    def has_option(self, name: str) -> bool:
        """May an operator of this policy ask for it?"""
        return name in self.policy.features and self.policy.features[name].kind == "option"

    def unpredicted(self, tokens: int) -> str:
        """Why a call is not predicted; empty for one that takes a native route whose kernels are modelled."""
        facts = self.plan.admission.facts
        call = CallFacts.usual(tokens, facts.hidden or 0, facts.top_k or 0, facts.activations or "float16")
        route = self.plan.route(call) if self.plan.supported else None
        if route is not None and route.backend in BACKENDS:
            return ""
        if route is not None and route.backend in STEPS:
            return f"{route.name} takes it, whose kernels are not modelled"
        takes = f"; {route.name} takes it" if route else "; nothing takes it"
        return f"the policy has no native route{takes}"


def planned_on(policy: Policy, architecture: str, geometry: Geometry) -> Planned:
    """The policy's plan on a GPU such as "sm_70". No flag counts: neither the environment nor a file is read."""
    return Planned(policy, Plan(admit(policy, Settings(), contract_facts(policy), everything(architecture, geometry))))


def everything(architecture: str, geometry: Geometry) -> Machine:
    """This machine's backends beside a GPU for which all is built: only the policy decides."""
    digits = architecture.removeprefix("sm_")
    device = Device(GPU, (int(digits[:-1]), int(digits[-1])), PRETENDED)
    sizes = dict.fromkeys(STEPS, (geometry.record(),))
    build = Build(PRETENDED, PRETENDED, images=frozenset({architecture}), sizes=sizes)
    return with_gpu(probe(native=False, devices=(device,)), device, build)
