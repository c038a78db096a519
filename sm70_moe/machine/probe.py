"""Looking at this machine: devices, torch, the native build, the backends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sm70_moe.machine.devices import CPU, Device, cuda_devices
from sm70_moe.machine.installed import installed_build, plugin_tests
from sm70_moe.machine.machine import Machine

if TYPE_CHECKING:
    from sm70_moe.kernels.build.specialiser import Specialiser
    from sm70_moe.kernels.protocol import Backend, Broken


def probe(
    *,
    native: bool = True,
    kernels: Path | None = None,
    dependent: bool = True,
    kernel_cache: Path | bool = False,
    backends: Mapping[str, Backend | Broken] | None = None,
    devices: tuple[Device, ...] | None = None,
) -> Machine:
    """Look at this machine without importing torch and without starting CUDA.

    `native=False` does not even look for the native build; `kernels` is a folder with another one than
    the package's own, `dependent=False` keeps its kernels from overlapping. `kernel_cache` is where
    kernels lie that are compiled on this machine (True: the user's cache directory, False: none are).
    GPUs come from the driver's management library, numbered as `CUDA_VISIBLE_DEVICES` and
    `CUDA_DEVICE_ORDER` make CUDA number them, as far as that can be known; `devices` are taken instead of
    them. Self-tests run when their result is first asked for, and only on real devices. Raises
    SettingsError for a folder that holds no build.
    """
    made = specialiser(kernel_cache) if native else None
    if backends is None:
        from sm70_moe.kernels.registry import load

        backends = {name: configured(backend, kernels, dependent, made) for name, backend in load().items()}
    real = devices is None
    if devices is None:
        devices = cuda_devices(os.environ)
    return Machine(
        devices=(*devices, CPU),
        backends=MappingProxyType(dict(backends)),
        build=installed_build(kernels, backends, devices if real else (), made) if native else None,
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


def configured(
    backend: Backend | Broken, kernels: Path | None, dependent: bool, made: Specialiser | None = None
) -> Backend | Broken:
    """A native backend of this package for that build and what is compiled here; any other one as it is."""
    from sm70_moe.kernels.native.backend import NativeBackend

    if not isinstance(backend, NativeBackend):
        return backend
    return replace(backend.configured(kernels, dependent), specialiser=made)


def specialiser(kernel_cache: Path | bool) -> Specialiser | None:
    """What compiles kernels on this machine, and keeps them in that folder (True: the user's)."""
    from sm70_moe.kernels.build.entries import Entries, default_folder
    from sm70_moe.kernels.build.specialiser import Specialiser

    if kernel_cache is False:
        return None
    folder = default_folder(os.environ) if kernel_cache is True else kernel_cache
    return Specialiser(Entries(folder) if folder else None)
