"""Which versions a layer needs: those that the steps of its backends launch, for its own sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sm70_moe.kernels.build import Job
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.launch import Step
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.layout import BankLayout, BankShape


@dataclass(frozen=True, slots=True)
class Layer:
    """What chooses a layer's kernels: one rank's sizes, its banks, the architecture, the engine's dtype."""

    shape: BankShape
    layout: BankLayout
    top_k: int
    architecture: str
    dtype: str = "float16"

    def case(self, tokens: int, dependent: bool) -> Case:
        return Case(self.shape, self.layout, self.top_k, tokens, self.architecture, dependent, self.dtype)


def jobs(specialiser: Specialiser, name: str, layer: Layer) -> tuple[Job, ...]:
    """The compilations that a backend, or an option of one, needs for a layer; sorted, each once.

    Nothing for a step that only has the version for any sizes.
    """
    geometry = layer.case(1, False).geometry
    found = {
        job.key: job
        for step in steps(name, layer)
        if (job := specialiser.job(step.source, layer.architecture, geometry, step.axes)) is not None
    }
    return tuple(found[key] for key in sorted(found))


def steps(name: str, layer: Layer) -> Iterator[Step]:
    """Every kernel that calls of any length launch, with dependent launch and without."""
    route = STEPS.get(name)
    for tokens in route.planned(layer.shape, layer.top_k) if route else ():
        for dependent in (False, True):
            assert route is not None
            yield from route.steps(layer.case(tokens, dependent))
