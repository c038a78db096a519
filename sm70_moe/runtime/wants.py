"""What policies and plans ask for, before anything of it is looked up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sm70_moe.kernels.declared import TUNED
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import Policy
from sm70_moe.settings.flags import FlagState
from sm70_moe.settings.settings import Settings


def wants_native(policies: Iterable[Policy], settings: Settings) -> bool:
    """Is any native feature not switched off? With `0` the build is not even looked up."""
    return any(wanted for policy in policies for wanted in native_features(policy, settings))


def native_features(policy: Policy, settings: Settings) -> Iterator[bool]:
    """For each native feature: may it be admitted? One that is unset does not step in for what is switched off."""
    flags = settings.flags(policy)
    for name, feature in policy.features.items():
        if feature.native:
            off = any(flags[other].state is FlagState.OFF for other in feature.unless_off)
            state = flags[name].state
            yield state is FlagState.REQUIRE or (state is FlagState.AUTO and not off)


def wants_tuning(plan: Plan) -> bool:
    """Does a plan admit the option?"""
    return any(decision.feature == TUNED and decision.admitted for decision in plan.decisions)
