"""Decides, explains and runs the right kernel for 4-bit (AWQ) mixture-of-experts layers.

The public names load on first use, so that the import itself reads no environment, configures
nothing and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm70_moe.admission.admit import Admission, admit
    from sm70_moe.decision import Decision, Finding, Outcome, Reason, Status
    from sm70_moe.errors import (
        AdmissionRefused,
        BackendError,
        CheckpointError,
        DriftError,
        FactsError,
        PolicyError,
        RankDisagreement,
        SettingsError,
        Sm70MoeError,
    )
    from sm70_moe.facts import CallFacts, LayerFacts, TensorFacts
    from sm70_moe.machine.machine import Machine
    from sm70_moe.machine.probe import probe
    from sm70_moe.plan.agreement import agree
    from sm70_moe.plan.plan import Plan, compare_plans
    from sm70_moe.policy import Policy, load_policy
    from sm70_moe.record.sink import Sink
    from sm70_moe.runtime.layer import MoELayer
    from sm70_moe.runtime.service import AdmissionService
    from sm70_moe.settings.flags import FlagState
    from sm70_moe.settings.settings import Settings

__version__ = "0.1.0"

_HOMES = {
    "Admission": "admission.admit",
    "AdmissionRefused": "errors",
    "AdmissionService": "runtime.service",
    "BackendError": "errors",
    "CallFacts": "facts",
    "CheckpointError": "errors",
    "Decision": "decision",
    "DriftError": "errors",
    "FactsError": "errors",
    "Finding": "decision",
    "FlagState": "settings.flags",
    "LayerFacts": "facts",
    "Machine": "machine.machine",
    "MoELayer": "runtime.layer",
    "Outcome": "decision",
    "Plan": "plan.plan",
    "Policy": "policy",
    "PolicyError": "errors",
    "RankDisagreement": "errors",
    "Reason": "decision",
    "Settings": "settings.settings",
    "SettingsError": "errors",
    "Sink": "record.sink",
    "Sm70MoeError": "errors",
    "Status": "decision",
    "TensorFacts": "facts",
    "admit": "admission.admit",
    "agree": "plan.agreement",
    "compare_plans": "plan.plan",
    "load_policy": "policy",
    "probe": "machine.probe",
}

__all__ = [
    "Admission",
    "AdmissionRefused",
    "AdmissionService",
    "BackendError",
    "CallFacts",
    "CheckpointError",
    "Decision",
    "DriftError",
    "FactsError",
    "Finding",
    "FlagState",
    "LayerFacts",
    "Machine",
    "MoELayer",
    "Outcome",
    "Plan",
    "Policy",
    "PolicyError",
    "RankDisagreement",
    "Reason",
    "Settings",
    "SettingsError",
    "Sink",
    "Sm70MoeError",
    "Status",
    "TensorFacts",
    "admit",
    "agree",
    "compare_plans",
    "load_policy",
    "probe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
