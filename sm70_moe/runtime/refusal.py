"""What a refused layer is told with."""

from __future__ import annotations

from collections.abc import Iterable

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Decision, Outcome, obstacle_text
from sm70_moe.errors import AdmissionRefused


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
