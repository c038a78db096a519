"""What a refused layer is told with."""

from __future__ import annotations

from collections.abc import Iterable

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Decision, Outcome, obstacle_text
from sm70_moe.errors import AdmissionRefused
from sm70_moe.plan.plan import Plan
from sm70_moe.settings.flags import FlagState


def refuse_unmet(plans: Iterable[Plan]) -> None:
    """Raise AdmissionRefused if a feature that is required was admitted for no layer at all."""
    required: dict[str, list[tuple[Plan, Decision]]] = {}
    for plan in plans:
        for decision in plan.decisions:
            if decision.flag == FlagState.REQUIRE:
                required.setdefault(decision.flag_source or "", []).append((plan, decision))
    for asked in required.values():
        if not any(decision.admitted for _, decision in asked):
            plan, decision = asked[0]
            raise refusal(plan.admission, [decision])


def refusal(admission: Admission, decisions: Iterable[Decision]) -> AdmissionRefused:
    """The error that lists every reason of every refused decision."""
    lines = [f"{admission.facts.layer}: admission refused under policy {admission.policy.name}"]
    for decision in decisions:
        asked = f" (flag {decision.flag}, from {decision.flag_source})" if decision.flag else ""
        lines.append(f"  {decision.feature}{asked}:")
        lines += [f"    {f.check}: {obstacle_text(f)}" for f in decision.obstacles]
    if any(d.outcome is Outcome.REFUSED for d in decisions):
        lines.append("  unset the flag, or set it to 0, to fall back to an older route")
    return AdmissionRefused(admission.facts.layer, admission.decisions, *lines)
