"""Kernels that a plan's routes need and the build does not hold: compiled before the plan is final."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import Job
from sm70_moe.kernels.build.images import RUN_TIME
from sm70_moe.kernels.build.specialiser import Made
from sm70_moe.machine.build import Build, images_id
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.specialised import wanted_by

EVENT = "moe kernels"


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
        build = replace(machine.build, refused=machine.build.refused | self._refused)
        return Plan(replace(plan.admission, machine=replace(machine, build=build)))


def record(made: Made) -> dict[str, Plain]:
    """What was compiled, as an event tells it."""
    count, seconds = len(made.compiled), round(made.seconds, 3)
    text = f"{count} kernel version{'s' if count != 1 else ''} compiled in {seconds:.1f} s: {', '.join(made.compiled)}"
    return {"compiled": list(made.compiled), "kept": list(made.kept), "seconds": seconds, "text": text}
