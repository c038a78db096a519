"""Kernels that a plan's routes need and the build does not hold: compiled before the plan is final."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import Job
from sm70_moe.kernels.build.images import RUN_TIME, SPECIALISED
from sm70_moe.kernels.build.specialiser import Made
from sm70_moe.kernels.build.versions import Version
from sm70_moe.kernels.native.specialised import jobs
from sm70_moe.machine.build import Build, images_id
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.planned import PlannedRoute
from sm70_moe.plan.specialised import layer_of, sizes_of, wanted_by

if TYPE_CHECKING:
    from sm70_moe.runtime.proof import Proof

EVENT = "moe kernels"

DOUBT = "wrong with kernels for the layer's sizes; tried again with those for any sizes"


class Tell(Protocol):
    """Told what happened, as a sink is."""

    def __call__(self, name: str, level: str = "info", **fields: Plain) -> None: ...


@dataclass(slots=True)
class Kernels:
    """Has the kernels of plans made, once each; a plan whose kernels cannot be made gets those for any sizes."""

    tell: Tell
    _refused: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, plan: Plan) -> Plan:
        """The plan with kernels that are there: its digest says which, so that ranks can agree on them."""
        build = plan.admission.machine.build
        if build is None or build.specialiser is None:
            return plan
        with self._lock:
            plan = self._without_refused(plan)
            for route, wanted in wanted_by(plan, build):
                images = images_id(wanted)  # several routes may share them
                if route.choice.images == images and images not in self._refused:
                    self._make(plan.layer, build, wanted)
                elif route.choice.version == RUN_TIME:
                    self._hint(build)
            return self._without_refused(plan)

    def doubt(self, plan: Plan, failed: Sequence[Proof]) -> Plan | None:
        """The plan with kernels for any sizes where those for the layer's own failed their proof.

        None if no route that failed has any of its own. Layers that are alike get the same from now on.
        """
        build = plan.admission.machine.build
        with self._lock:
            doubted = doubtful(plan, {proof.route for proof in failed})
            if build is None or build.specialiser is None or not doubted:
                return None
            build.specialiser.distrust(versions(plan, doubted))
            self._refused |= names(plan, doubted)
            for proof in failed:
                self.tell(EVENT, "warning", layer=plan.layer, **proof.record(), text=f"{proof.route}: {DOUBT}")
            return self._without_refused(plan)

    def trust(self, plan: Plan, failed: Sequence[Proof]) -> None:
        """Take `doubt` of this plan back: kernels for any sizes failed too, so the fault is another one."""
        build = plan.admission.machine.build
        with self._lock:
            doubted = doubtful(plan, {proof.route for proof in failed})
            if build is not None and build.specialiser is not None:
                build.specialiser.trust(versions(plan, doubted))
                self._refused -= names(plan, doubted)

    def _make(self, layer: str, build: Build, wanted: tuple[Job, ...]) -> None:
        assert build.specialiser is not None
        names = ", ".join(job.version.name for job in wanted)
        try:
            made = build.specialiser.make(wanted, self._warn)
        except BackendError as error:
            self._refused.add(images_id(wanted))
            text = f"{names}: not made on this machine: {error}; kernels for any sizes run instead"
            self._once(text, layer=layer)
        else:
            if made.compiled:
                self.tell(EVENT, "info", layer=layer, **record(made))

    def _hint(self, build: Build) -> None:
        assert build.specialiser is not None
        if build.specialiser.missing:
            self._once(f"kernels for any sizes run, which are slower: {build.specialiser.missing}")

    def _warn(self, file: Path, text: str) -> None:
        self._once(f"{file}: {text}", file=str(file))

    def _once(self, text: str, **fields: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.tell(EVENT, "warning", **fields, text=text)

    def _without_refused(self, plan: Plan) -> Plan:
        """The same plan where what could not be made is not counted on."""
        machine = plan.admission.machine
        assert machine.build is not None
        if self._refused <= machine.build.refused:
            return plan
        build = replace(machine.build, refused=machine.build.refused | frozenset(self._refused))
        return Plan(replace(plan.admission, machine=replace(machine, build=build)))


@dataclass(slots=True)
class SecondTry:
    """What a layer whose routes failed their proof is tried with once more."""

    kernels: Kernels
    _first: tuple[Plan, Sequence[Proof]] | None = None

    def plan(self, plan: Plan, failed: Sequence[Proof]) -> Plan | None:
        """The plan with kernels for any sizes, once; None where there is nothing else to try."""
        if self._first is None:
            again = self.kernels.doubt(plan, failed)
            self._first = (plan, failed) if again is not None else None
            return again
        first, before = self._first
        if {proof.route for proof in before} <= {proof.route for proof in failed}:
            self.kernels.trust(first, before)
        return None


def doubtful(plan: Plan, failed: Set[str]) -> list[PlannedRoute]:
    """Routes that failed with kernels for the layer's own sizes."""
    return [route for route in plan.routes if route.name in failed and route.choice.version == SPECIALISED]


def names(plan: Plan, routes: Iterable[PlannedRoute]) -> frozenset[str]:
    """What `Build.refused` calls the kernels of these routes."""
    build = plan.admission.machine.build
    assert build is not None
    exact = build.exact_id(sizes_of(plan.admission))
    return frozenset(exact if route.choice.images == build.id else route.choice.images for route in routes)


def versions(plan: Plan, routes: Iterable[PlannedRoute]) -> frozenset[Version]:
    """The versions for the layer's own sizes that these routes launch."""
    build, layer = plan.admission.machine.build, layer_of(plan.admission)
    if build is None or build.specialiser is None or layer is None:
        return frozenset()
    return frozenset(job.version for route in routes for job in jobs(build.specialiser, route.backend, layer))


def record(made: Made) -> dict[str, Plain]:
    """What was compiled, as an event tells it."""
    count, seconds = len(made.compiled), round(made.seconds, 3)
    text = f"{count} kernel version{'s' if count != 1 else ''} compiled in {seconds:.1f} s: {', '.join(made.compiled)}"
    return {"compiled": list(made.compiled), "kept": list(made.kept), "seconds": seconds, "text": text}
