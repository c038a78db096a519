"""Building: every version of every source to a cubin, into one folder with its record.

Runs in the package's own build hook, by `sm70-moe build-kernels`, and by
`python -m sm70_moe.kernels.build` in a checkout. Same sources, options, compiler and scope give the
same bytes and the same build id.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm70_moe import unfinished
from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import nvrtc
from sm70_moe.kernels.build.geometry import shipped_architectures, shipped_geometries
from sm70_moe.kernels.build.images import RECORD, Cubins, digest
from sm70_moe.kernels.build.manifest import ARCHITECTURES, Manifest, load_manifests
from sm70_moe.kernels.build.trust import close_to_others
from sm70_moe.kernels.build.versions import Scope, Version, versions

SOURCES = Path(__file__).parents[1] / "cuda"
INSTALLED = Path(__file__).parents[1] / "cubins"
"""Where the package's own build lies."""

OPTIONS = ("--std=c++17",)
"""Options of every compilation, besides the architecture, the macros and a manifest's own."""

COMPILER = " ".join(nvrtc.REQUIREMENTS)

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
"""A header of the sources' own folder."""

Progress = Callable[[int, int], None]
"""Called with the number of cubins done and of all cubins."""


@dataclass(frozen=True, slots=True)
class Job:
    """One compilation; `key` is the digest of everything that its result depends on."""

    version: Version
    source: str
    options: tuple[str, ...]
    key: str


def shipped_scope() -> Scope:
    """Every architecture, and the geometries of the policies that come with the package, on those that they name."""
    return Scope(ARCHITECTURES, shipped_geometries(), exact=shipped_architectures())


def build_id(scope: Scope, sources: Path | None = None) -> str:
    """SHA-256 (hex) of the sources (default: the package's), the options, the compiler and the scope."""
    files = {name: digest(content) for name, content in source_files(sources or SOURCES).items()}
    content = {"compiler": COMPILER, "options": OPTIONS, "scope": scope.record(), "sources": files}
    return digest(json.dumps(content, sort_keys=True).encode())


def expected_id(cubins: Cubins, *, own: bool) -> str:
    """The id that the installed sources would give a build of this scope.

    The package's `own` build has to be for the policies as they are now as well.
    """
    scope = cubins.scope
    if own:
        return build_id(replace(scope, geometries=shipped_geometries(), exact=shipped_architectures()))
    return build_id(scope)


def source_files(folder: Path) -> dict[str, bytes]:
    """Sources, headers and manifests of a folder, by name."""
    kinds = {".cu", ".cuh", ".h", ".toml"}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in kinds}


def build(
    out: Path,
    scope: Scope,
    *,
    sources: Path | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Cubins:
    """Compile everything in `scope` into the folder `out`, which is replaced as a whole.

    `cache` keeps compiled cubins between builds. Raises BackendError for a source that does not
    compile, a compiler that is not installed, and an `out` that holds something other than a build or cannot be
    written.
    """
    check_target(out)
    sources = sources or SOURCES
    manifests = load_manifests(sources)
    if odd := sorted(manifests.keys() ^ {path.stem for path in sources.glob("*.cu")}):
        raise BackendError(f"{sources}: {', '.join(odd)}: every NAME.cu has a NAME.toml, and the other way round")
    headers = headers_of(sources)
    texts = {name: (sources / f"{name}.cu").read_text(encoding="utf-8") for name in manifests}
    jobs = [job_of(v, manifests[v.source], texts[v.source], headers) for v in versions(manifests.values(), scope)]
    try:
        with replaced(out) as fresh, kept(cache, fresh) as store:
            missing = [job for job in jobs if not (store / job.key).exists()]
            compile_jobs(missing, headers, store, workers or cpus(), progress)
            compiled = {job.version: (store / job.key).read_bytes() for job in jobs}
            made = Cubins.write(fresh, build_id(scope, sources), COMPILER, scope, compiled)
    except OSError as error:
        where = error.filename or out
        raise BackendError(
            f"{out}: cannot be written: {where}: {error.strerror or error}; accepted is a folder"
        ) from error
    return replace(made, folder=out.resolve())


def check_target(out: Path) -> None:
    """Only a folder that is new, empty or an earlier build is replaced."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise BackendError(f"{out}: is no folder; accepted is a new one, an empty one or an earlier build")
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        raise BackendError(f"{out}: holds no {RECORD}; accepted is a new folder, an empty one or an earlier build")


def job_of(version: Version, manifest: Manifest, source: str, headers: Mapping[str, str]) -> Job:
    macros = (f"-D{name}={value}" for name, value in version.macros(manifest).items())
    options = (f"--gpu-architecture={version.architecture}", *OPTIONS, *manifest.options, *macros)
    content = [COMPILER, source, list(options), sorted((name, headers[name]) for name in included(source, headers))]
    return Job(version, source, options, digest(json.dumps(content).encode()))


def included(source: str, headers: Mapping[str, str]) -> frozenset[str]:
    """Names of the headers that a source asks for, directly or through others, whatever conditions stand there."""
    found: set[str] = set()
    texts = [source]
    while texts:
        fresh = (set(INCLUDE.findall(texts.pop())) & headers.keys()) - found
        found |= fresh
        texts += [headers[name] for name in fresh]
    return frozenset(found)


def headers_of(sources: Path) -> dict[str, str]:
    """The headers of a folder of sources, by the name under which they are included."""
    return {name: text.decode() for name, text in source_files(sources).items() if Path(name).suffix in {".cuh", ".h"}}


def compile_jobs(
    jobs: Sequence[Job], headers: Mapping[str, str], store: Path, workers: int, progress: Progress
) -> None:
    """Compile in processes of their own, since NVRTC takes one program at a time in each."""
    if not jobs:
        return
    done = iter(range(1, len(jobs) + 1))
    shares = [share for share in (jobs[i::workers] for i in range(workers)) if share]
    with ThreadPoolExecutor(len(shares)) as pool:
        for failure in pool.map(lambda s: _work(s, headers, store, lambda: progress(next(done), len(jobs))), shares):
            if failure:
                raise BackendError(failure)


def _work(jobs: Sequence[Job], headers: Mapping[str, str], store: Path, tick: Callable[[], None]) -> str:
    """Run one worker over its share; returns what went wrong, or nothing."""
    command = [sys.executable, "-P", nvrtc.__file__]
    order = json.dumps({"includes": headers, "jobs": [_order(job, store) for job in jobs]})
    # the log goes to a file: a pipe that nobody reads would stop a worker that has much to say
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as worker,
    ):
        assert worker.stdin
        assert worker.stdout
        worker.stdin.write(order.encode())
        worker.stdin.close()
        for _ in worker.stdout:
            tick()
        if not worker.wait():
            return ""
        log.seek(0)
        return log.read().decode(errors="replace").strip() or f"the compiler ended with {worker.returncode}"


def _order(job: Job, store: Path) -> dict[str, object]:
    out = str(store / job.key)
    return {"name": f"{job.version.name}.cu", "source": job.source, "options": job.options, "out": out}


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place at the end, if nothing was raised."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with unfinished.folder(out.parent, out.name) as temporary:
        fresh = temporary / "new"
        fresh.mkdir()
        yield fresh
        close_to_others(fresh)
        if out.exists():
            os.replace(out, temporary / "old")
        os.replace(fresh, out)


@contextmanager
def kept(cache: Path | None, beside: Path) -> Iterator[Path]:
    """The folder for compiled cubins by key: the cache, or one that is removed at the end."""
    store = cache or beside.with_name("store")
    store.mkdir(parents=True, exist_ok=True)
    yield store
    if cache is None:
        shutil.rmtree(store)


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
