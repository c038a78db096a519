"""Launching: steps to kernels of one build on one device, with grids and arguments packed in advance.

What costs time is done when a program is made. A call writes its addresses into one buffer and hands
each kernel to the driver; nothing is allocated, read or synchronised, so a CUDA graph can capture it.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import INSTALLED, SOURCES, expected_id
from sm70_moe.kernels.build.images import RECORD, Cubins, Images
from sm70_moe.kernels.build.manifest import KINDS, Kernel, Manifest, load_manifests
from sm70_moe.kernels.build.specialiser import Extended, Specialiser
from sm70_moe.kernels.build.trust import check_own
from sm70_moe.kernels.native.driver import Config, Driver, Fire
from sm70_moe.kernels.native.residency import Residency

if TYPE_CHECKING:
    pass

SLOT = 8
"""Bytes kept for an argument, whatever its kind."""

GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
"""Blocks in x, y and z; CUDA's limits on every architecture."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel of a call: which, and with which grid (x, y, z; 1 where left out).

    `axes` chooses the version; an axis that it leaves out has its first value. `threads` and `shared`
    (dynamic, bytes) default to the manifest's. `values` are arguments that only this step has.
    `dependent`: may start before the kernel in front has ended, and waits for it itself (sm_90 and
    later). `cooperative`: all blocks must be resident at once; of `grid`'s first size no more are launched
    than fit, so such a kernel shares its work out among the blocks that there are.
    """

    source: str
    kernel: str
    grid: tuple[int, ...]
    axes: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    shared: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    dependent: bool = False
    cooperative: bool = False


class Program:
    """Some kernels that are launched one after the other, and the buffer with their arguments.

    Calling it takes a stream (0 is the default stream; the device must be current then) and the
    `varying` numbers, in that order: addresses, sizes. Threads take turns.
    """

    __slots__ = ("_buffer", "_launches", "_lock", "_pack", "_tables", "varying")

    def __init__(
        self, launches: Sequence[tuple[Kernel, Fire, Mapping[str, float]]], varying: Sequence[str], values: Values
    ) -> None:
        self.varying = tuple(varying)
        layout = _Layout(self.varying)
        rows = [
            [layout.place(kernel.name, a.name, a.kind, own, values) for a in kernel.arguments]
            for kernel, _, own in launches
        ]
        self._buffer = layout.buffer()
        base = ctypes.addressof(self._buffer)
        self._tables = [(ctypes.c_void_p * max(1, len(row)))(*(base + place for place in row)) for row in rows]
        addresses = [ctypes.addressof(table) for table in self._tables]
        self._launches = tuple((fire, at) for (_, fire, _), at in zip(launches, addresses, strict=True))
        self._pack = struct.Struct(layout.format()).pack_into
        self._lock = threading.Lock()

    def __call__(self, stream: int, *numbers: float) -> None:
        """Launch everything on a stream. Raises LaunchRefused with the driver's text."""
        with self._lock:  # the driver copies the arguments while it launches
            self._pack(self._buffer, 0, *numbers)
            for fire, table in self._launches:
                fire(stream, table)


Values = Mapping[str, float]
"""Arguments by name: numbers, or addresses."""


class _Layout:
    """Where each argument stands in the buffer: varying ones first, so that one call packs them all."""

    def __init__(self, varying: Sequence[str]) -> None:
        self.varying = varying
        self.kinds: dict[str, str] = {}
        self.constants: dict[tuple[str, float, str], int] = {}

    def place(self, kernel: str, name: str, kind: str, own: Values, values: Values) -> int:
        """Offset of an argument. Raises BackendError for one that nobody gives a value."""
        if name in own or name not in self.varying:
            value = own.get(name, values.get(name))
            if value is None:
                raise BackendError(f"kernel {kernel!r}: nobody gives its argument {name!r}")
            index = self.constants.setdefault((name, value, kind), len(self.constants))
            return (len(self.varying) + index) * SLOT
        if self.kinds.setdefault(name, kind) != kind:
            raise BackendError(f"kernel {kernel!r}: argument {name!r} is {kind}, elsewhere {self.kinds[name]}")
        return self.varying.index(name) * SLOT

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        made = ctypes.create_string_buffer(max(1, len(self.varying) + len(self.constants)) * SLOT)
        for (name, value, kind), index in self.constants.items():
            try:
                struct.pack_into(f"<{KINDS[kind][0]}", made, (len(self.varying) + index) * SLOT, value)
            except struct.error as error:
                raise BackendError(f"argument {name!r}: {value!r} is no {kind}: {error}") from error
        return made

    def format(self) -> str:
        """`struct` format of the varying arguments; one that no kernel takes is packed like a pointer."""
        kinds = (KINDS[self.kinds.get(name, "ptr")] for name in self.varying)
        return "<" + "".join(f"{code}{SLOT - size}x" if size < SLOT else code for code, size in kinds)


class Launcher:
    """The kernels of one build on one device; each is loaded once. May be used from several threads."""

    def __init__(self, images: Images, manifests: Mapping[str, Manifest], device: int, driver: Driver) -> None:
        self.images, self.manifests = images, manifests
        self.device, self.driver = device, driver
        self.architecture = driver.architecture(device)
        self._loaded: dict[tuple[str, str], object] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        device: str | int,
        folder: Path | None = None,
        driver: Driver | None = None,
        specialiser: Specialiser | None = None,
    ) -> Launcher:
        """Kernels of the installed build, or of the build in `folder`, on "cuda:N", and what `specialiser` made.

        Raises BackendError where there is no build, where it is stale, and without cuda.core.
        """
        cubins = Cubins.open(INSTALLED if folder is None else folder)
        if cubins is None:
            raise BackendError(f"{folder or INSTALLED}: no native build")
        if folder is not None:
            check_own(cubins.folder, (RECORD, *cubins.files))
        expected = expected_id(cubins, own=folder is None)
        if cubins.id != expected:
            raise BackendError(f"{cubins.folder}: build id {cubins.id}, expected {expected}: build again")
        if driver is None:
            from sm70_moe.kernels.native.devices import CudaDriver

            driver = CudaDriver()
        images = cubins if specialiser is None else Extended(cubins, specialiser)
        return cls(images, load_manifests(SOURCES), ordinal(device), driver)

    def program(
        self,
        steps: Iterable[Step],
        *,
        varying: Sequence[str] = (),
        values: Values = MappingProxyType({}),
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Program:
        """Everything that a call launches. `sizes` (hidden, intermediate, ...) choose the versions.

        `varying` names the arguments that are given at every call, `values` has the others. Raises
        BackendError for what is not in the build, does not fit, or has no value; LaunchRefused if
        the driver does not load a kernel.
        """
        launches = []
        for step in steps:
            kernel, handle, config = self._configured(step, sizes)
            if step.cooperative:
                config = cut_to(self._residency(handle, config), kernel.name, config)
            launches.append((kernel, self.driver.prepare(self.device, handle, config), step.values))
        return Program(launches, varying, values)

    def residency(self, step: Step, sizes: Mapping[str, int]) -> Residency:
        """How many blocks of a step the device holds at once; raises what `program` raises."""
        _, handle, config = self._configured(step, sizes)
        return self._residency(handle, config)

    def holds(self, step: Step, sizes: Mapping[str, int]) -> bool:
        """Is there an image of a step's source for these sizes?"""
        try:
            self.images.find(step.source, self.architecture, sizes, self._axes(step))
        except BackendError:
            return False
        return True

    def _axes(self, step: Step) -> dict[str, str]:
        return {axis.name: next(iter(axis.values)) for axis in self.manifests[step.source].axes} | dict(step.axes)

    def _residency(self, handle: object, config: Config) -> Residency:
        return self.driver.residency(self.device, handle, config.threads, config.shared)

    def _configured(self, step: Step, sizes: Mapping[str, int]) -> tuple[Kernel, object, Config]:
        kernel, handle = self._kernel(step, sizes)
        return kernel, handle, config_of(step, kernel, partial(self.driver.threads, self.device, handle))

    def _kernel(self, step: Step, sizes: Mapping[str, int]) -> tuple[Kernel, object]:
        manifest = self.manifests.get(step.source)
        if manifest is None or step.kernel not in manifest.kernels:
            raise BackendError(f"no kernel {step.kernel!r} in a source {step.source!r}")
        if misfits := manifest.misfits(sizes):
            raise BackendError(f"{step.source}: " + "; ".join(f"{n} {sizes[n]}, accepted is {a}" for n, a in misfits))
        image = self.images.find(step.source, self.architecture, sizes, self._axes(step))
        key = (image.version.name, step.kernel)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self.driver.load(self.device, self.images.read(image), step.kernel)
            return manifest.kernels[step.kernel], self._loaded[key]


def config_of(step: Step, kernel: Kernel, bound: Callable[[], int]) -> Config:
    """A step's launch; `bound` gives a kernel's launch bound. Raises BackendError for a grid beyond CUDA's limits."""
    x, y, z = (*step.grid, 1, 1, 1)[:3]
    for size, limit in zip((x, y, z), GRID_LIMITS, strict=True):
        if not 1 <= size <= limit or len(step.grid) > len(GRID_LIMITS):
            raise BackendError(f"kernel {kernel.name!r}: grid {step.grid}, accepted are 1 to {GRID_LIMITS} blocks")
    threads = step.threads or kernel.threads or bound()
    shared = kernel.shared if step.shared is None else step.shared
    return Config((x, y, z), threads, shared, step.dependent, step.cooperative)


def cut_to(residency: Residency, kernel: str, config: Config) -> Config:
    """A cooperative launch with no more blocks than fit. Raises BackendError where not even one row of them does."""
    x, y, z = config.grid
    if not residency.cooperative:
        raise BackendError(f"kernel {kernel!r}: the device has no cooperative launch")
    if residency.blocks < y * z:
        raise BackendError(f"kernel {kernel!r}: {residency.blocks} blocks fit at once, needed are {y * z} or more")
    return replace(config, grid=(min(x, residency.blocks // (y * z)), y, z))


def ordinal(device: str | int) -> int:
    """Number of a CUDA device: 1 for "cuda:1", 0 for "cuda"."""
    kind, _, number = str(device).rpartition(":") if ":" in str(device) else (str(device), "", "0")
    if isinstance(device, int):
        return device
    if kind != "cuda" or not number.isdecimal():
        raise BackendError(f"device {device!r}: accepted is cuda or cuda:N")
    return int(number)
