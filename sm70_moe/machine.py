"""What this machine has: devices, torch, the native build, the backends.

`Machine` is a plain value, so that a test or `explain --capability` can make up any machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.native.residency import Residency

if TYPE_CHECKING:
    from sm70_moe.kernels import Backend, Broken
    from sm70_moe.kernels.build.images import Cubins
    from sm70_moe.kernels.native.backend import NativeBackend


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
    build. `images` are the architectures it holds machine code for, `backends` those of each backend
    (None: the same for all; a backend that is left out has no kernels). `self_tests` maps (device,
    backend) to "" for a known-answer call that came out right, else to what went wrong; a `Refusal`
    is the driver's own text. `sizes` are the geometries that kernels of a backend, or of an option of
    one, were made for; `residencies` what a device holds at once of an option's (a text: why nobody knows).
    """

    id: str
    expected: str
    images: frozenset[str]
    self_tests: Mapping[tuple[str, str], str] = field(default_factory=dict)
    backends: Mapping[str, frozenset[str]] | None = None
    sizes: Mapping[str, tuple[Mapping[str, int], ...]] = field(default_factory=dict)
    residencies: Mapping[tuple[str, str], Residency | str] = field(default_factory=dict)

    def images_of(self, backend: str) -> frozenset[str]:
        """Architectures for which there is machine code of a backend."""
        return self.images if self.backends is None else self.backends.get(backend, frozenset())

    def specialised(self, name: str) -> tuple[Mapping[str, int], ...]:
        """Sizes by name that a backend's or an option's kernels were made for."""
        return self.sizes.get(name, ())

    def made_for(self, name: str, sizes: Mapping[str, int | None]) -> bool:
        """Are there kernels of a backend or an option for just these sizes? They may name more than kernels ask."""
        return any(made.items() <= sizes.items() for made in self.specialised(name))


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
    kernels: Path | None = None,
    dependent: bool = True,
    backends: Mapping[str, Backend | Broken] | None = None,
    devices: tuple[Device, ...] | None = None,
) -> Machine:
    """Look at this machine without importing torch and without starting CUDA.

    `native=False` does not even look for the native build; `kernels` is a folder with another one than
    the package's own, `dependent=False` keeps its kernels from overlapping. GPUs come from the driver's
    management library, in its order, cut down to `CUDA_VISIBLE_DEVICES`; `devices` are taken instead
    of them. Self-tests run when their result is first asked for, and only on real devices. Raises
    SettingsError for a folder that holds no build.
    """
    if backends is None:
        from sm70_moe.kernels.registry import load

        backends = {name: configured(backend, kernels, dependent) for name, backend in load().items()}
    real = devices is None
    if devices is None:
        devices = visible_devices(nvml_devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(
        devices=(*devices, CPU),
        backends=MappingProxyType(dict(backends)),
        build=installed_build(kernels, backends, devices if real else ()) if native else None,
        build_looked_up=native,
        torch=installed_version("torch"),
    )


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, read from its metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def configured(backend: Backend | Broken, kernels: Path | None, dependent: bool) -> Backend | Broken:
    """A native backend of this package for that build; any other one as it is."""
    from sm70_moe.kernels.native.backend import NativeBackend

    return backend.configured(kernels, dependent) if isinstance(backend, NativeBackend) else backend


def installed_build(
    folder: Path | None = None,
    backends: Mapping[str, Backend | Broken] = MappingProxyType({}),
    devices: tuple[Device, ...] = (),
) -> Build | None:
    """The native build inside the package, or in `folder`; None if the package has none.

    No cubin is read. Self-tests are those of `backends` on `devices`. Raises SettingsError for a
    folder without a build.
    """
    from sm70_moe.kernels.build import INSTALLED, expected_id
    from sm70_moe.kernels.build.images import Cubins

    try:
        cubins = Cubins.open(folder or INSTALLED)
    except BackendError as error:
        return Build(f"unreadable: {error}", "a whole record", frozenset())
    if cubins is None and folder is not None:
        raise SettingsError(f"kernels {str(folder)!r}: no native build there, accepted is a folder of build-kernels")
    if cubins is None:
        return None
    return Build(
        id=cubins.id,
        expected=expected_id(cubins, own=folder is None),
        images=cubins.architectures,
        self_tests=self_tests(backends, devices),
        backends=backend_images(cubins),
        sizes=kernel_sizes(cubins),
        residencies=residencies(backends, devices),
    )


def backend_images(cubins: Cubins) -> Mapping[str, frozenset[str]]:
    """Architectures for which a build holds everything that a backend launches."""
    from sm70_moe.kernels.native.steps import STEPS

    return MappingProxyType({name: cubins.of_sources(route.sources) for name, route in STEPS.items()})


def self_tests(backends: Mapping[str, Backend | Broken], devices: tuple[Device, ...]) -> Mapping[tuple[str, str], str]:
    """The self-tests of this package's native backends on each device, none of them run yet."""
    from sm70_moe.kernels.native.backend import NativeBackend
    from sm70_moe.kernels.native.pending import Pending

    natives = {name: backend for name, backend in backends.items() if isinstance(backend, NativeBackend)}
    natives |= options_of(backends)
    return Pending(
        {(d.name, name): partial(backend.self_test, d.name) for name, backend in natives.items() for d in devices}
    )


def residencies(
    backends: Mapping[str, Backend | Broken], devices: tuple[Device, ...]
) -> Mapping[tuple[str, str], Residency | str]:
    """What each device holds at once of an option's kernels; asked when somebody wants to know."""
    from sm70_moe.kernels.native.pending import Pending

    options = options_of(backends)
    return Pending({(d.name, name): partial(one.residency, d.name) for name, one in options.items() for d in devices})


def options_of(backends: Mapping[str, Backend | Broken]) -> dict[str, NativeBackend]:
    """Option -> the native backend that honours it, as it runs then."""
    from sm70_moe.kernels.native.backend import NativeBackend

    natives = [backend for backend in backends.values() if isinstance(backend, NativeBackend)]
    return {option: native.with_options({option}) for native in natives for option in sorted(native.options)}


def kernel_sizes(cubins: Cubins) -> Mapping[str, tuple[Mapping[str, int], ...]]:
    """Backend, or option of one -> geometries that the build has specialised kernels for."""
    from sm70_moe.kernels.native.steps import STEPS

    def made(name: str) -> tuple[Mapping[str, int], ...]:
        found = {i.version.sizes for i in cubins.images if i.version.source in STEPS[name].sources}
        return tuple(dict(sizes) for sizes in sorted(found) if sizes)

    return MappingProxyType({name: made(name) for name in STEPS})


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
                    nvml_memory(pynvml, handle),
                ),
            )
            for i, handle in enumerate(handles)
        )
    finally:
        pynvml.nvmlShutdown()


def nvml_memory(nvml: Any, handle: object) -> int | None:
    """Bytes of a GPU's memory; None for one that shares the host's and has no figure of its own."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None


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
