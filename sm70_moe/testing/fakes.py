"""Fakes: a machine with the devices and the native build that a test needs.

A fake native backend keeps the protocol and computes with the portable arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from sm70_moe.decision import Finding
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels import registry
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import FUSED, capability
from sm70_moe.kernels.native.steps import OPTIONS
from sm70_moe.kernels.protocol import Backend, Broken, Workspace
from sm70_moe.layout import BankLayout, BankShape
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import CPU, Device
from sm70_moe.machine.machine import Machine
from sm70_moe.settings.settings import Settings
from sm70_moe.testing.driver import V100

if TYPE_CHECKING:
    from sm70_moe.banks.banks import Banks
    from sm70_moe.kernels.call import Call
    from sm70_moe.numbers.codes import WeightSource

BuildState = Literal["missing", "fake", "stale"]
NATIVE = ("decode", "qpn", "grouped", "indexed")
"""Backends that need the native build."""

FIRST_SIZES = {"hidden": 2560, "intermediate": 160, "top_k": 10, "group": 32}
"""What the fake build has kernels of options for."""


@dataclass(frozen=True, slots=True)
class FakeNative:
    """A native backend that runs anywhere: `legacy`'s arithmetic under another name."""

    name: str
    portable: Backend
    native: bool = True

    @property
    def options(self) -> Set[str]:
        return OPTIONS.get(self.name, frozenset())

    def can(self, architecture: str | None) -> Capability | None:
        """What the real one is declared to run."""
        return None if architecture == "cpu" else capability(self.name, architecture)

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        return ()

    def workspace(self, shape: BankShape, top_k: int, tokens: int) -> int:
        return self.portable.workspace(shape, top_k, tokens)

    def prepare(self, source: WeightSource, layout: BankLayout, shape: BankShape, device: str) -> Banks:
        return self.portable.prepare(source, layout, shape, device)

    def run(self, banks: Banks, call: Call, space: Workspace | None = None) -> None:
        self.portable.run(banks, call, space)


def fake_backends() -> Mapping[str, Backend | Broken]:
    """The built-in backends, the native ones replaced by fakes that run."""
    found = dict(registry.load())
    portable = found["legacy"]
    assert not isinstance(portable, Broken)
    return MappingProxyType({**found, **{name: FakeNative(name, portable) for name in NATIVE}})


def fake_build(device: str = "cuda:0", *, stale: bool = False, images: Set[str] = frozenset({"sm_70"})) -> Build:
    """A native build whose self-tests passed on one device; `stale` gives it another build id."""
    return Build(
        id="fake-build-of-yesterday" if stale else "fake-build",
        expected="fake-build",
        images=frozenset(images),
        self_tests={(device, name): "" for name in (*NATIVE, FUSED)},
        sizes={FUSED: (FIRST_SIZES,)},
        residencies={(device, FUSED): V100},
    )


def fake_machine(
    capability: tuple[int, int] | None = (7, 0), build: BuildState | Build = "fake", device: str = "cuda:0"
) -> Machine:
    """A machine with one device of this compute capability (None: only the CPU) and this build."""
    if isinstance(build, str):
        made = None if build == "missing" else fake_build(device, stale=build == "stale")
    else:
        made = build
    gpus = () if capability is None else (Device(device, capability, "fake GPU", 32 * 2**30),)
    return Machine(devices=(*gpus, CPU), backends=fake_backends(), build=made, torch="0")


def settings(flags: Mapping[str, str] | None = None, **variables: str) -> Settings:
    """Settings from these variables alone; the process's environment is not read."""
    return Settings.from_env(variables, flags=flags)
