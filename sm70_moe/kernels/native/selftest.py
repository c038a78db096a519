"""The known-answer call: before a backend is admitted on a device, its kernels must compute there.

Every version that the build holds for the backend is run on a layer whose answer is known, with the
output and the activations poisoned with NaN. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.manifest import Manifest
from sm70_moe.kernels.native.answers import Known
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.driver import Arena
from sm70_moe.kernels.native.launch import Launcher, Step
from sm70_moe.kernels.native.refusal import LaunchRefused
from sm70_moe.kernels.native.steps import CALL, SCRATCH, Route, bank_arguments, numbers
from sm70_moe.layout import BankLayout, BankShape

ODD = Geometry(hidden=512, intermediate=128, experts=6, top_k=3, group=32)
"""About the sizes that the runtime version is tested with."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a geometry, a layout of its banks and a number of tokens."""

    geometry: Geometry
    layout: BankLayout
    tokens: int


def trials(launcher: Launcher, route: Route) -> Iterator[Trial]:
    """Every geometry that has kernels of its own, and one of no policy; every layout; `counts` of tokens."""
    manifests = [launcher.manifests[name] for name in route.sources]
    own = any(m.geometry for m in manifests)
    declared = [g for g in launcher.images.scope.geometries if own and all(m.fits(g) for m in manifests)]
    groups = sorted(route.runs.reads.groups or ())
    odd = [_odd(manifests, group) for group in groups] if all(m.runtime for m in manifests) else []
    tried: set[tuple[str, ...]] = set()
    for geometry in [*(g for g in declared if g.group in groups), *odd]:
        for layout in (one for one in route.layouts if one.group == geometry.group):
            every = [Trial(geometry, layout, tokens) for tokens in route.planned(shape_of(geometry), geometry.top_k)]
            yield from counts(every, launcher, route, tried)


def counts(every: list[Trial], launcher: Launcher, route: Route, tried: set[tuple[str, ...]]) -> Iterator[Trial]:
    """Fewest tokens, and the most for each kernel.

    Calls that are run in pieces are long where their kernels change: those that were `tried` with other metadata and
    groups, which they tell apart as they run, are not again.
    """
    most = {_kernels(trial, launcher, route): trial for trial in every}
    if route.pieces is None:
        yield from dict.fromkeys((every[0], *most.values()))
        return
    yield every[0]
    for kernels, trial in most.items():
        key = (trial.layout.order, *kernels)
        if key not in tried and trial is not every[0]:
            yield trial
        tried.add(key)


def cooperative_steps(launcher: Launcher, route: Route) -> Iterator[tuple[Step, dict[str, int]]]:
    """Every step whose blocks must be resident at once, with its sizes, over all trials of a route."""
    for trial in trials(launcher, route):
        for step in route.steps(case_of(trial, launcher, False)):
            if step.cooperative:
                yield step, trial.geometry.record()


def _kernels(trial: Trial, launcher: Launcher, route: Route) -> tuple[str, ...]:
    return tuple([step.kernel for step in route.steps(case_of(trial, launcher, False))])


def case_of(trial: Trial, launcher: Launcher, dependent: bool) -> Case:
    geometry = trial.geometry
    shape = shape_of(geometry)
    return Case(shape, trial.layout, geometry.top_k, trial.tokens, launcher.architecture, dependent)


def shape_of(geometry: Geometry) -> BankShape:
    return BankShape(geometry.experts, geometry.hidden, geometry.intermediate)


def _odd(manifests: list[Manifest], group: int) -> Geometry:
    """ODD, rounded up to what the kernels can run."""
    sizes = ODD.record() | {"group": group}
    units = {"hidden": lcm(32, group), "intermediate": lcm(32, group)}
    for manifest in manifests:
        for name, unit in manifest.divides.items():
            units[name] = lcm(units.get(name, 1), unit)
    return Geometry(**{name: -(-size // units.get(name, 1)) * units.get(name, 1) for name, size in sizes.items()})


def self_test(launcher: Launcher, route: Route, dependent: bool) -> str:
    """Run every trial; what went wrong first, or nothing. Raises LaunchRefused with the driver's text."""
    known: Known | None = None
    geometry: Geometry | None = None
    for trial in trials(launcher, route):  # those of one geometry come together
        if known is None or trial.geometry != geometry or len(known.x) < trial.tokens:
            geometry = trial.geometry
            known = Known.make(geometry, trial.tokens if route.pieces else route.last)
        with launcher.driver.arena(launcher.device) as memory:
            problem = run(launcher, route, trial, known.head(trial.tokens), memory, dependent)
        if problem:
            sizes = " ".join(f"{name} {size}" for name, size in trial.geometry.record().items())
            return f"{trial.layout.tag}, {sizes}, {trial.tokens} tokens: {problem}"
    return ""


def run(launcher: Launcher, route: Route, trial: Trial, known: Known, memory: Arena, dependent: bool) -> str:
    """One trial; what is wrong with its results, or nothing."""
    geometry, tokens = trial.geometry, trial.tokens
    case = case_of(trial, launcher, dependent)
    poison_out = np.full((tokens, geometry.hidden), np.nan, np.float16)
    poison_inner = np.full((tokens, geometry.top_k, geometry.intermediate), np.nan, np.float16)
    out, inner = np.empty_like(poison_out), np.empty_like(poison_inner)
    try:
        values = numbers(case) | bank_arguments({name: memory.put(a) for name, a in known.planes(trial.layout).items()})
        lent = route.lent(case.shape, case.top_k, tokens)
        values[SCRATCH] = memory.put(np.zeros(max(1, route.scratch, lent), np.uint8))
        inputs = [memory.put(a) for a in (known.x, known.ids, known.weights)]
        for count, steps in enumerate(route.rounds(case) if route.rounds else (route.steps(case),)):
            program = launcher.program(steps, varying=CALL, values=values, sizes=geometry.record())
            results = memory.put(poison_out), memory.put(poison_inner)
            program(0, *inputs, *results)
            memory.get(results[0], out)
            memory.get(results[1], inner)
            if problem := known.complaint(inner, out):
                return f"call {count + 1}: {problem}" if route.rounds else problem
    except LaunchRefused:
        raise
    except BackendError as error:
        return str(error)
    return ""
