"""A GPU that is not there: what would be decided if it were."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from sm70_moe.errors import SettingsError
from sm70_moe.kernels.native.residency import Residency
from sm70_moe.kernels.protocol import Broken
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import CPU, Device
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import probe

GPU = "cuda:0"


def pretended(capability: str, kernels: Path | None, kernel_cache: Path | bool = False) -> Machine:
    """This machine and its native build, as if it had one GPU of that compute capability."""
    match = re.fullmatch("([0-9]{1,2})[.]([0-9])", capability)
    if match is None:
        raise SettingsError(f'--capability {capability[:20]!r}: accepted is MAJOR.MINOR, such as "7.0"')
    major, minor = match.groups()
    found = probe(kernels=kernels, kernel_cache=kernel_cache, devices=(), native=True)
    return with_gpu(found, Device(GPU, (int(major), int(minor)), "as told by --capability"), found.build)


def with_gpu(machine: Machine, gpu: Device, build: Build | None) -> Machine:
    """A machine as if it had that GPU and that build: self-tests pass, blocks that must be there together fit."""
    natives = {name: b for name, b in machine.backends.items() if not isinstance(b, Broken) and b.native}
    options = {option for backend in natives.values() for option in backend.options}
    passed = {(gpu.name, name): "" for name in (*natives, *options)}
    fits = {(gpu.name, option): Residency(cooperative=True, multiprocessors=1, each=1) for option in options}
    made = build and replace(build, self_tests=passed, residencies=fits)
    return replace(machine, devices=(gpu, CPU), build=made, build_looked_up=True)
