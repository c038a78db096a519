"""Flags that a layer's policy does not have: whose they are, and why that policy does not speak about the layer."""

from __future__ import annotations

from collections.abc import Iterable

from sm70_moe.admission.case import Case
from sm70_moe.admission.checks.contract import contract_findings
from sm70_moe.decision import Decision, Finding, Outcome, Plain, Reason, Status
from sm70_moe.policy import Policy
from sm70_moe.settings.flags import FlagState


def undeclared(case: Case, others: Iterable[Policy]) -> tuple[Decision, ...]:
    """A decision for each such flag, since no feature of the policy carries it."""
    asked = case.settings.undeclared(case.policy)
    if not asked:
        return ()
    lenient, listed = case.policy.on.mixed_model == "admit-the-rest", list(others)
    return tuple(
        Decision(
            name,
            "flag",
            Outcome.NOT_OURS
            if case.layer.foreign
            else Outcome.OFF
            if flag.state is FlagState.OFF
            else Outcome.FELL_BACK
            if lenient
            else Outcome.REFUSED,
            findings_of(name, case, listed),
            flag.state.value,
            flag.source,
        )
        for name, flag in asked.items()
    )


def findings_of(flag: str, case: Case, others: Iterable[Policy]) -> tuple[Finding, ...]:
    """The policy has no such flag; then what keeps the layer from the nearest policy that has it."""
    policy = case.policy
    has: Plain = list(policy.features)
    near = [(policy_misfits(other, case), other) for other in others if flag in other.features]
    if not near:
        hint = f"policy {policy.name} has other flags" if has else f"policy {policy.name} has no flags"
        return (Finding.failed("flag", Reason.FLAG_UNDECLARED, has, flag, hint),)
    misfits, nearest = min(near, key=lambda pair: (len(pair[0]), pair[1].name))
    differs = ", ".join(finding.check for finding in misfits) or "nothing: name it with SM70_MOE_POLICY"
    hint = f"policy {policy.name} speaks about this layer; {nearest.name} has the flag, what differs from it: {differs}"
    return (Finding.failed("flag", Reason.FLAG_UNDECLARED, has, flag, hint), *misfits)


def policy_misfits(other: Policy, case: Case) -> tuple[Finding, ...]:
    """What a layer is not, of what another policy's contract asks for."""
    found = contract_findings(other.contract, case.layer, case.device)
    return tuple(finding for finding in found.values() if finding.status in (Status.FAIL, Status.UNKNOWN))
