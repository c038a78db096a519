"""What of an admitted layer chooses its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sm70_moe.admission.admit import Admission
from sm70_moe.kernels.build import Job
from sm70_moe.kernels.native.specialised import Layer
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.machine.build import Build
from sm70_moe.plan.memory import bank_shape
from sm70_moe.plan.planned import PlannedRoute

if TYPE_CHECKING:
    from sm70_moe.plan.plan import Plan


def sizes_of(admission: Admission) -> dict[str, int | None]:
    """A rank's sizes by name; None is not known."""
    facts = admission.facts
    return {
        "hidden": facts.hidden,
        "intermediate": facts.intermediate_per_rank,
        "experts": facts.experts,
        "top_k": facts.top_k,
        "group": admission.layout.group if admission.layout else None,
    }


def layer_of(admission: Admission) -> Layer | None:
    """The layer as kernels are made for it; None where something is not known, or there is no GPU."""
    shape, layout, device, top_k = bank_shape(admission), admission.layout, admission.device, admission.facts.top_k
    if shape is None or layout is None or device is None or top_k is None:
        return None
    dtype = admission.facts.activations
    return Layer(shape, layout, top_k, device.architecture, "bfloat16" if dtype == "bfloat16" else "float16")


def wanted_by(plan: Plan, build: Build) -> Iterator[tuple[PlannedRoute, tuple[Job, ...]]]:
    """The routes of a plan that could have kernels made for them, with what would be compiled."""
    sizes, layer = sizes_of(plan.admission), layer_of(plan.admission)
    for route in plan.routes:
        if route.backend in STEPS and (wanted := build.wanted(route.backend, sizes, layer)):
            yield route, wanted
