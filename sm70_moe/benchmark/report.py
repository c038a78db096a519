"""What a V100's owner sends: a result with all samples, and what it was measured with. Nothing that identifies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from sm70_moe import __version__
from sm70_moe.benchmark.anonymous import anonymous, own_names
from sm70_moe.benchmark.result import Result
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode.census import census
from sm70_moe.kernels.native.launch import Launcher
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import installed_version
from sm70_moe.plan.plan import Plan

DISTRIBUTIONS = ("torch", "numpy", "cuda-core", "cuda-bindings", "nvidia-ml-py")

CONTENTS = (
    "every sample of every arm; the GPU's model, driver, clocks, power, temperature, ECC and MIG state; versions of "
    "Python, torch, CUDA and this package; the policy's digest, the build id, registers and instructions of the "
    "kernels; self-tests, decisions and what was not run. No host or user name, path, serial number or UUID"
)
"""What is in a report, for who is asked to send one."""


def reported(result: Result, plan: Plan, launcher: Launcher | str) -> dict[str, Plain]:
    """The record of a result with everything else that a reader far away needs."""
    machine = plan.admission.machine
    more: dict[str, Plain] = {
        "versions": versions(),
        "self_tests": self_tests(machine, plan),
        "decisions": [decision.record() for decision in plan.decisions],
        "plan": plan.digest,
        "census": launcher if isinstance(launcher, str) else list(used_kernels(launcher, result, plan)),
    }
    record = replace(result, extra={**result.extra, **more}).record()
    found = anonymous(record, own_names() | given_place(plan.admission.settings.kernels))
    assert isinstance(found, dict)
    return found | {"gpu": record["gpu"]}  # a machine that is called V100 must not take the model's name away


def given_place(folder: Path | None) -> dict[str, str]:
    """A folder that a setting gave: "mine/kernels" does not look like a path. A single word may be one of ours."""
    return {str(folder): "<path>"} if folder is not None and len(folder.parts) > 1 else {}


def versions() -> dict[str, Plain]:
    """Of what computes and what measures."""
    import torch

    found: dict[str, Plain] = {"sm70-moe": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    found |= {name: installed_version(name) for name in DISTRIBUTIONS}
    return found | {"cuda": torch.version.cuda, "torch_architectures": list(torch.cuda.get_arch_list())}


def self_tests(machine: Machine, plan: Plan) -> dict[str, Plain]:
    """Backend -> "" for right, else what went wrong, on the device that was measured."""
    tests: Mapping[tuple[str, str], str] = machine.build.self_tests if machine.build else {}
    device = plan.admission.device
    return {name: tests[place, name] for place, name in tests if device and place == device.name}


def used_kernels(launcher: Launcher, result: Result, plan: Plan) -> Iterator[dict[str, Plain]]:
    """The machine code of the kernels that may have been launched, for each kind of metadata."""
    kinds = result.protocol["metadata"]
    assert isinstance(kinds, list)
    sources = dict.fromkeys(("roofline", *(name for route in STEPS.values() for name in route.sources)))
    order, seen = plan.layout.order if plan.layout else "", set()
    for source in sources:
        for kind in kinds:
            axes = {axis.name: next(iter(axis.values)) for axis in launcher.manifests[source].axes}
            axes |= {name: value for name, value in (("metadata", str(kind)), ("order", order)) if name in axes}
            try:
                image = launcher.images.find(source, launcher.architecture, result.geometry, axes)
                kernels = () if image.version.name in seen else census(launcher.images.read(image))
            except BackendError:  # no such version for this device: it was not launched either
                continue
            seen.add(image.version.name)
            yield from ({"version": image.version.name, **found.record()} for found in kernels)
