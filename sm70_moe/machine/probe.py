"""Looking at this machine: devices, torch, the native build, the backends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sm70_moe.machine.devices import CPU, Device, cuda_devices
from sm70_moe.machine.installed import installed_build, plugin_tests
from sm70_moe.machine.machine import Machine

if TYPE_CHECKING:
    from sm70_moe.kernels.protocol import Backend, Broken


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
    management library, numbered as `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` make CUDA number
    them, as far as that can be known; `devices` are taken instead of them. Self-tests run when their
    result is first asked for, and only on real devices. Raises SettingsError for a folder that holds no
    build.
    """
    if backends is None:
        from sm70_moe.kernels.registry import load

        backends = {name: configured(backend, kernels, dependent) for name, backend in load().items()}
    real = devices is None
    if devices is None:
        devices = cuda_devices(os.environ)
    return Machine(
        devices=(*devices, CPU),
        backends=MappingProxyType(dict(backends)),
        build=installed_build(kernels, backends, devices if real else ()) if native else None,
        build_looked_up=native,
        torch=installed_version("torch"),
        plugin_tests=plugin_tests(backends, devices if real else ()),
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
