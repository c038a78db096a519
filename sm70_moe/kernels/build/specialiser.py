"""Kernels specialised on the spot: compiled for a layer's sizes on the machine that runs it.

The same worker process compiles as in a build, and the same gate judges. What was compiled is kept in
a folder of `Entries`, so that it happens once a machine; where nothing can be kept, it is used from memory.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import SOURCES, Job, cpus, headers_of, job_of, nvrtc
from sm70_moe.kernels.build.entries import Entries
from sm70_moe.kernels.build.gate import judged
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.images import Image, Images, digest
from sm70_moe.kernels.build.manifest import Manifest, load_manifests
from sm70_moe.kernels.build.versions import Scope, Version
from sm70_moe.kernels.machinecode.budget import SPEED

LONGEST = 120.0
"""Seconds that a compiler may take for one layer; usual are one or two."""

Warn = Callable[[Path, str], None]
"""Called with a kept file, and why it is not used or could not be written."""

Compile = Callable[[Sequence[Job], Mapping[str, str]], Mapping[str, bytes]]
"""Jobs and headers to cubins by key. Raises BackendError."""


@dataclass(frozen=True, slots=True)
class Made:
    """What was compiled just now, what came from the folder, and how many seconds both took."""

    compiled: tuple[str, ...]
    kept: tuple[str, ...]
    seconds: float


class Specialiser:
    """Makes versions that a build does not hold. May be used from several threads.

    `entries` is None where nothing is kept. `compiler` and `missing` (why there is none) stand in for
    NVRTC in tests.
    """

    def __init__(
        self,
        entries: Entries | None,
        *,
        sources: Path | None = None,
        compiler: Compile | None = None,
        missing: Callable[[], str] | None = None,
    ) -> None:
        self.entries = entries
        self._sources, self._compiler, self._look = sources or SOURCES, compiler or compiled, missing or nvrtc.missing
        self._made: dict[Version, bytes] = {}
        self._distrusted: frozenset[Version] = frozenset()
        self._ready: dict[tuple[str, ...], bool] = {}
        self._lock = threading.Lock()

    @cached_property
    def missing(self) -> str:
        """Why nothing can be compiled here, with what to install; looked up once."""
        return self._look()

    @property
    def holds_any(self) -> bool:
        """Is anything kept in the folder?"""
        return self.entries is not None and self.entries.any()

    @cached_property
    def manifests(self) -> Mapping[str, Manifest]:
        return load_manifests(self._sources)

    @cached_property
    def headers(self) -> Mapping[str, str]:
        return headers_of(self._sources)

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {name: (self._sources / f"{name}.cu").read_text(encoding="utf-8") for name in self.manifests}

    def job(self, source: str, architecture: str, geometry: Geometry, axes: Mapping[str, str]) -> Job | None:
        """The version of a source for just these sizes; None where its manifest has none.

        An axis that `axes` leaves out has its first value.
        """
        manifest = self.manifests[source]
        values = {axis.name: axes.get(axis.name, next(iter(axis.values))) for axis in manifest.axes}
        if not manifest.geometry or architecture not in manifest.architectures or not manifest.fits(geometry):
            return None
        if any(values[a.name] in a.runtime or values[a.name] in a.tests for a in manifest.axes):
            return None
        sizes = geometry.record()
        version = Version(source, architecture, tuple((n, sizes[n]) for n in manifest.geometry), tuple(values.items()))
        return job_of(version, manifest, self._texts[source], self.headers)

    def can(self, jobs: Sequence[Job]) -> bool:
        """Can these be had: is there a compiler, or are all of them kept? Answered once, so that plans stay equal."""
        keys = tuple(job.key for job in jobs)
        with self._lock:
            if keys not in self._ready:
                kept = self.entries is not None and all(map(self.entries.has, keys))
                self._ready[keys] = bool(keys) and (kept or not self.missing)
            return self._ready[keys]

    def make(self, jobs: Iterable[Job], warn: Warn) -> Made:
        """Have these versions ready: out of memory, the folder, or the compiler.

        Raises BackendError for what does not compile or breaks its budget; none of the jobs is used then.
        """
        with self._lock:
            start = time.perf_counter()
            wanted = {job.key: job for job in jobs if job.version not in self._made}
            self._check_folder(warn)
            kept = self._kept(wanted.values(), warn)
            waited, fresh = self._fresh([job for key, job in wanted.items() if key not in kept], warn)
            kept |= waited
            cubins = {job.version: (kept | fresh)[key] for key, job in wanted.items()}
            self._judge(cubins)
            self._made |= cubins
            compiled, found = (tuple(wanted[key].version.name for key in part) for part in (fresh, kept))
            return Made(compiled, found, time.perf_counter() - start)

    def image(self, source: str, architecture: str, sizes: Mapping[str, int], axes: Mapping[str, str]) -> Image | None:
        """What was made for these sizes, as an image without a file."""
        manifest = self.manifests.get(source)
        if manifest is None or not all(name in sizes for name in manifest.geometry):
            return None
        named = tuple((name, sizes[name]) for name in manifest.geometry)
        values = tuple((axis.name, axes.get(axis.name, "")) for axis in manifest.axes)
        version = Version(source, architecture, named, values)
        content = None if version in self._distrusted else self._made.get(version)
        return None if content is None else Image(version, "", 0, len(content), digest(content))

    def trusts(self, version: Version) -> bool:
        """Whether kernels of a version for one geometry, compiled or of a build, may be used."""
        return version not in self._distrusted

    def distrust(self, versions: Iterable[Version]) -> None:
        """Use these no more from now on; what was loaded before stays."""
        with self._lock:
            self._distrusted |= frozenset(versions)

    def trust(self, versions: Iterable[Version]) -> None:
        """Take `distrust` back."""
        with self._lock:
            self._distrusted -= frozenset(versions)

    def read(self, image: Image) -> bytes | None:
        """The cubin of an image that `image` gave; None for another one."""
        return None if image.file else self._made.get(image.version)

    def _check_folder(self, warn: Warn) -> None:
        """A folder that is not ours alone is left alone from now on."""
        if self.entries is not None and (problem := self.entries.unfit()):
            warn(self.entries.folder, f"not used, {problem}; compiled kernels are used from memory")
            self.entries = None

    def _kept(self, jobs: Iterable[Job], warn: Warn) -> dict[str, bytes]:
        """Cubins out of the folder; a file that is not used is told of."""
        found: dict[str, bytes] = {}
        if self.entries is None:
            return found
        for job in jobs:
            entry = self.entries.load(job.key)
            if entry.content is not None:
                found[job.key] = entry.content
            elif entry.ignored:
                warn(self.entries.path(job.key), f"not used, {entry.ignored}; compiled again")
        return found

    def _fresh(self, jobs: Sequence[Job], warn: Warn) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Cubins that another process has made while this one waited, and those compiled here, kept for later."""
        if not jobs:
            return {}, {}
        with ExitStack() as stack:
            if self.entries is not None and not self.missing:
                stack.enter_context(self.entries.locked())
            found = self._kept(jobs, lambda file, text: None)  # told of already
            left = [job for job in jobs if job.key not in found]
            if left and self.missing:
                raise BackendError(self.missing)
            made = dict(self._compiler(left, self.headers)) if left else {}
            self._keep(made, warn)
        return found, made

    def _keep(self, made: Mapping[str, bytes], warn: Warn) -> None:
        if self.entries is None or not made:
            return
        try:
            for key, content in made.items():
                self.entries.store(key, content)
            self.entries.sweep()
        except OSError as error:
            warn(self.entries.folder, f"not written: {error.strerror or error}; compiled kernels are used from memory")

    def _judge(self, cubins: Mapping[Version, bytes]) -> None:
        """The build's gate, but for what only costs time. Raises BackendError that names every number."""
        told = [
            f"{version.name}: {found.kernel}: {text}"
            for version, content in cubins.items()
            for found, overruns in judged(version, content, self.manifests[version.source])
            for text in overruns
            if text.split()[0] not in SPEED
        ]
        if told:
            raise BackendError("; ".join(told))


@dataclass(frozen=True, slots=True)
class Extended:
    """The images of a build, and what was made on the spot where it has none for a layer's sizes."""

    installed: Images
    specialiser: Specialiser

    @property
    def id(self) -> str:
        return self.installed.id

    @property
    def scope(self) -> Scope:
        return self.installed.scope

    def of_sources(self, sources: Iterable[str]) -> frozenset[str]:
        return self.installed.of_sources(sources)

    def find(self, source: str, architecture: str, sizes: Mapping[str, int], axes: Mapping[str, str]) -> Image:
        own = self.specialiser.image(source, architecture, sizes, axes)
        found = own or self.installed.find(source, architecture, sizes, axes)
        if self.specialiser.trusts(found.version):
            return found
        return self.installed.find(source, architecture, {}, axes)  # fits the version for any sizes alone

    def read(self, image: Image) -> bytes:
        own = self.specialiser.read(image)
        return self.installed.read(image) if own is None else own


def compiled(jobs: Sequence[Job], headers: Mapping[str, str]) -> dict[str, bytes]:
    """Cubins by key, compiled in processes of their own. Raises BackendError with the compiler's log."""
    workers = min(cpus(), len(jobs))
    shares = [jobs[start::workers] for start in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(lambda share: _work(share, headers), shares))
    return {key: content for part in parts for key, content in part.items()}


def _work(jobs: Sequence[Job], headers: Mapping[str, str]) -> dict[str, bytes]:
    """One worker. Nothing is written: the disk may be full, or not ours."""
    orders = [{"name": f"{j.version.name}.cu", "source": j.source, "options": j.options} for j in jobs]
    order = json.dumps({"includes": dict(headers), "jobs": orders}).encode()
    command = [sys.executable, "-P", nvrtc.__file__]
    try:
        done = subprocess.run(command, input=order, capture_output=True, timeout=LONGEST, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"the compiler cannot be run: {error}") from error
    lines = done.stdout.split()
    if done.returncode or len(lines) != len(jobs):
        log = done.stderr.decode(errors="replace").strip()
        raise BackendError(log or f"the compiler ended with {done.returncode}")
    return {job.key: base64.b64decode(line) for job, line in zip(jobs, lines, strict=True)}
