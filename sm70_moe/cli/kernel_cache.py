"""Filling the folder of kernels ahead of time: what `build-kernels --cache` compiles for a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sm70_moe.admission.admit import admit
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.cli.opening import open_checkpoint
from sm70_moe.cli.output import aside
from sm70_moe.cli.pretence import pretended
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.build import Job
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.machine.build import images_id
from sm70_moe.machine.devices import cuda_devices
from sm70_moe.machine.machine import Machine
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.specialised import wanted_by
from sm70_moe.policy import Policy, choose_policy, read_operator
from sm70_moe.settings.settings import Settings


@dataclass(slots=True)
class Filled:
    """Versions by name: compiled now, there before, and those that cannot be used, with why."""

    folder: str
    compiled: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Plain]:
        compiled: list[Plain] = [*self.compiled]
        kept: list[Plain] = [*self.kept]
        refused: list[Plain] = [*self.refused]
        return {"folder": self.folder, "compiled": compiled, "kept": kept, "refused": refused}


def fill(checkpoint: Path, tp: int, ep: int, capabilities: list[str], policy: str | None) -> Filled:
    """Compile what the layers of a checkpoint need. Raises SettingsError and BackendError where nothing can be."""
    settings, policies = read_operator(policy)
    if settings.kernel_cache is False:
        raise SettingsError("SM70_MOE_KERNEL_CACHE=0: nothing is kept; accepted is a folder, or to leave it unset")
    opened = open_checkpoint(checkpoint, settings)
    filled = Filled("")
    for capability in capabilities or here():
        machine = pretended(capability, settings.kernels, settings.kernel_cache)
        specialiser = specialiser_of(machine)
        if specialiser.entries is None:
            raise SettingsError("SM70_MOE_KERNEL_CACHE: this user has no home; accepted is a folder")
        filled.folder = str(specialiser.entries.folder)
        sets = {images_id(wanted): wanted for wanted in needed(opened, tp, ep, settings, policies, machine)}
        for wanted in sets.values():
            make(specialiser, wanted, filled)
    return filled


def here() -> list[str]:
    """The compute capabilities of this machine's GPUs, each once."""
    found = list(
        dict.fromkeys(f"{d.capability[0]}.{d.capability[1]}" for d in cuda_devices(os.environ) if d.capability)
    )
    if not found:
        raise SettingsError('--capability: this machine has no GPU; accepted is MAJOR.MINOR, such as "7.0"')
    return found


def specialiser_of(machine: Machine) -> Specialiser:
    """What compiles; BackendError without a build, which has the kernels for any sizes, and for a stale one."""
    build = machine.build
    if build is None or build.specialiser is None:
        raise BackendError("no native build; kernels are compiled beside one: reinstall with it")
    if build.id != build.expected:
        raise BackendError(f"native build {build.id[:16]}: stale, expected {build.expected[:16]}: build again")
    return build.specialiser


def needed(
    checkpoint: Checkpoint, tp: int, ep: int, settings: Settings, policies: tuple[Policy, ...], machine: Machine
) -> Iterator[tuple[Job, ...]]:
    """For each native route of each layer, what the build does not hold; first and last expert-parallel rank."""
    assert machine.build is not None
    for layer in checkpoint.layers:
        for rank in sorted({0, ep - 1}):
            facts = checkpoint.facts(
                layer,
                tensor_parallel=tp,
                tensor_rank=0,
                expert_parallel=ep,
                expert_rank=rank,
                device=machine.devices[0].name,
            )
            plan = Plan(admit(choose_policy(policies, facts), settings, facts, machine, others=policies))
            yield from (wanted for _, wanted in wanted_by(plan, machine.build))


def make(specialiser: Specialiser, wanted: tuple[Job, ...], filled: Filled) -> None:
    """Compile one set. What cannot be used is told; what cannot be written is an error, since that was the point."""
    if not specialiser.can(wanted):
        raise BackendError(specialiser.missing)
    troubles: list[str] = []

    def warn(file: Path, text: str) -> None:
        aside(f"warning: {file}: {text}")
        troubles.extend([f"{file}: {text}"] if "not written" in text else [])

    try:
        made = specialiser.make(wanted, warn)
    except BackendError as error:
        filled.refused.append(str(error))
        return
    if troubles:
        raise BackendError(troubles[0])
    filled.compiled.extend(made.compiled)
    filled.kept.extend(made.kept)
    if made.compiled:
        aside(f"{', '.join(made.compiled)}: compiled in {made.seconds:.1f} s")
