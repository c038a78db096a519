"""What this machine has: devices, torch, the native build, the backends.

`Machine` is a plain value, so that a test or `explain --capability` can make up any machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING

from sm70_moe.decision import Plain

if TYPE_CHECKING:
    from sm70_moe.kernels import Backend, Broken


@dataclass(frozen=True, slots=True)
class Device:
    """One place where a layer can run. `capability` is None for a CPU; `memory` is in bytes."""

    name: str
    capability: tuple[int, int] | None
    model: str = ""
    memory: int | None = None

    @property
    def architecture(self) -> str:
        """ "sm_70" for compute capability 7.0; "cpu" for a CPU."""
        if self.capability is None:
            return "cpu"
        major, minor = self.capability
        return f"sm_{major}{minor}"


CPU = Device("cpu", None, "CPU")


@dataclass(frozen=True, slots=True)
class Build:
    """The native kernels that are installed.

    `expected` is the build id that this package's sources would give: another `id` is a stale
    build. `images` are the architectures it holds machine code for. `self_tests` maps
    (device, backend) to "" for a known-answer call that came out right, else to what went wrong.
    """

    id: str
    expected: str
    images: frozenset[str]
    self_tests: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that admission may know about where it runs.

    `build` is None where there is none; `build_looked_up` is False where nobody looked, because
    every flag of a native route is 0. `torch` is the installed version, None without torch.
    """

    devices: tuple[Device, ...]
    backends: Mapping[str, Backend | Broken]
    build: Build | None = None
    build_looked_up: bool = True
    torch: str | None = None

    def device(self, name: str) -> Device | None:
        """The device of that name; "cuda" is "cuda:0"."""
        wanted = "cuda:0" if name == "cuda" else name
        return next((d for d in self.devices if d.name == wanted), None)

    def record(self) -> dict[str, Plain]:
        return {
            "devices": [{"name": d.name, "architecture": d.architecture, "model": d.model} for d in self.devices],
            "backends": sorted(self.backends),
            "build": self.build.id if self.build else None,
            "torch": self.torch,
        }

    @property
    def fingerprint(self) -> str:
        """Digest of the record: equal on machines that admission cannot tell apart."""
        return hashlib.sha256(repr(self.record()).encode()).hexdigest()[:16]


def probe(
    *,
    native: bool = True,
    backends: Mapping[str, Backend | Broken] | None = None,
    devices: tuple[Device, ...] | None = None,
) -> Machine:
    """Look at this machine without importing torch and without starting CUDA.

    `native=False` does not even look for the native build. GPUs come from the driver's management
    library, in its order, cut down to `CUDA_VISIBLE_DEVICES`; `devices` are taken instead of them.
    """
    if backends is None:
        from sm70_moe.kernels.registry import load

        backends = load()
    if devices is None:
        devices = visible_devices(nvml_devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(
        devices=(*devices, CPU),
        backends=MappingProxyType(dict(backends)),
        build=installed_build() if native else None,
        build_looked_up=native,
        torch=installed_version("torch"),
    )


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, read from its metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_build() -> Build | None:
    """The native build inside the package; this version has none yet."""
    return None


def nvml_devices() -> tuple[tuple[str, Device], ...]:
    """(UUID, device) of every NVIDIA GPU; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            (
                pynvml.nvmlDeviceGetUUID(handle),
                Device(
                    f"cuda:{i}",
                    tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    pynvml.nvmlDeviceGetName(handle),
                    pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                ),
            )
            for i, handle in enumerate(handles)
        )
    finally:
        pynvml.nvmlShutdown()


def visible_devices(found: tuple[tuple[str, Device], ...], visible: str | None) -> tuple[Device, ...]:
    """Devices as CUDA numbers them: `visible` has indices or UUID prefixes; the first bad one ends it."""
    if visible is None:
        return tuple(device for _, device in found)
    chosen: list[Device] = []
    for item in visible.split(","):
        name = item.strip()
        matches = [d for i, (uuid, d) in enumerate(found) if name == str(i) or (name and uuid.startswith(name))]
        if len(matches) != 1:
            break
        chosen.append(replace(matches[0], name=f"cuda:{len(chosen)}"))
    return tuple(chosen)
