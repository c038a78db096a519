"""Kernels specialised on the spot: the folder that keeps them, and who compiles what, when.

The compiler is a fake one that gives the sample's cubins, but where a test says NVRTC.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels import build as build_module
from sm70_moe.kernels.build import Job, nvrtc
from sm70_moe.kernels.build import entries as entries_module
from sm70_moe.kernels.build import specialiser as module
from sm70_moe.kernels.build.entries import ABANDONED, MOST, Entries, default_folder
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.images import Cubins, digest
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.build.specialiser import Extended, Specialiser
from sm70_moe.kernels.build.versions import Scope, Version
from sm70_moe.kernels.machinecode.census import census
from sm70_moe.kernels.native.specialised import Layer, jobs
from sm70_moe.layout import BankLayout, BankShape, Metadata

DATA = Path(__file__).parents[2] / "data" / "kernels"
SIZES = Geometry(hidden=2048, intermediate=384, experts=128, top_k=8, group=128)
NAME = "sample.sm_90.hidden2048-group128.no"
ROOT = Path(__file__).parents[3]


class Compiler:
    """Gives the sample's cubin, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fault: Exception | None = None

    def __call__(self, wanted: Sequence[Job], headers: Mapping[str, str]) -> dict[str, bytes]:
        self.asked += [job.version.name for job in wanted]
        if self.fault:
            raise self.fault
        return {job.key: cubin(job.version.architecture) for job in wanted}


def cubin(architecture: str) -> bytes:
    return (DATA / f"{architecture}.cubin").read_bytes()


class Bench:
    """One process: a specialiser over a folder, a compiler that counts, and what was warned of."""

    def __init__(self, folder: Path | None, missing: str = "", sources: Path = DATA) -> None:
        self.compiler, self.told = Compiler(), list[str]()
        entries = None if folder is None else Entries(folder)
        self.specialiser = Specialiser(entries, sources=sources, compiler=self.compiler, missing=lambda: missing)

    def job(self, architecture: str = "sm_90") -> Job:
        found = self.specialiser.job("sample", architecture, SIZES, {})
        assert found is not None
        return found

    def make(self, architecture: str = "sm_90"):
        return self.specialiser.make([self.job(architecture)], lambda file, text: self.told.append(text))

    def image(self, architecture: str = "sm_90") -> bytes | None:
        found = self.specialiser.image("sample", architecture, SIZES.record(), {"late": "no"})
        return found and self.specialiser.read(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_first_start(folder: Path) -> None:
    """Compiled, kept under its key with the digest beside the bytes, and found for the layer's sizes."""
    bench = Bench(folder)
    made = bench.make()
    assert (made.compiled, made.kept) == ((NAME,), ())
    assert (bench.image(), bench.told) == (cubin("sm_90"), [])
    key = bench.job().key
    assert kept(folder) == [f"{key}.kernel"]
    head = f"sm70-moe kernel 1\n{key}\n{digest(cubin('sm_90'))}\n".encode()
    assert (folder / f"{key}.kernel").read_bytes() == head + cubin("sm_90")
    assert (folder / f"{key}.kernel").stat().st_mode & 0o022 == 0


def test_asked_again_in_one_process(folder: Path) -> None:
    """Nothing is read or compiled for the layers that follow."""
    bench = Bench(folder)
    bench.make()
    made = bench.make()
    assert (made.compiled, made.kept, len(bench.compiler.asked)) == ((), (), 1)


def test_second_start(folder: Path) -> None:
    """Nothing is compiled: no compiler has to be there any more."""
    Bench(folder).make()
    bench = Bench(folder, missing="no compiler here")
    assert bench.specialiser.can([bench.job()])
    made = bench.make()
    assert (made.compiled, made.kept, bench.compiler.asked, bench.told) == ((), (NAME,), [], [])
    assert bench.image() == cubin("sm_90")


@pytest.fixture
def lenient(tmp_path: Path) -> Path:
    """The sample with budgets that its code keeps on every architecture."""
    sources = tmp_path / "lenient"
    sources.mkdir()
    (sources / "sample.cu").write_bytes((DATA / "sample.cu").read_bytes())
    text = re.sub(
        r"\[kernels\.(\w+)\.budget\][^\[]*", r"[kernels.\1.budget]\n" + LENIENT, (DATA / "sample.toml").read_text()
    )
    (sources / "sample.toml").write_text(re.sub(r"\[kernels\.volta\.budget\.sm_90\][^\[]*", "", text))
    return sources


LENIENT = "stack = 256\nlocal = 99\ncalls = 9\n\n"


def test_other_architecture(folder: Path, lenient: Path) -> None:
    """A key of its own: neither disturbs the other."""
    Bench(folder).make("sm_90")
    bench = Bench(folder, sources=lenient)
    assert bench.make("sm_120").compiled == ("sample.sm_120.hidden2048-group128.no",)
    assert (bench.image("sm_120"), bench.image("sm_90")) == (cubin("sm_120"), None)
    assert len(kept(folder)) == 2


@pytest.mark.parametrize("what", ["compiler", "options", "source"])
def test_another_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """What the bytes depend on is in the name: an update of it compiles anew."""
    Bench(folder).make()
    sources = tmp_path / "cuda"
    sources.mkdir()
    for name in ("sample.cu", "sample.toml"):
        (sources / name).write_bytes((DATA / name).read_bytes())
    if what == "compiler":
        monkeypatch.setattr(build_module, "COMPILER", "nvidia-cuda-nvrtc-cu12==13.0.0")
    elif what == "options":
        monkeypatch.setattr(build_module, "OPTIONS", ("--std=c++17", "-lineinfo"))
    else:
        (sources / "sample.cu").write_text("// another")
    bench = Bench(folder, sources=sources)
    assert bench.make().compiled == (NAME,)
    assert len(kept(folder)) == 2


@pytest.mark.parametrize(("header", "compiled"), [("asked.cuh", (NAME,)), ("other.cuh", ())])
def test_a_header_belongs_to_who_includes_it(
    folder: Path, tmp_path: Path, header: str, compiled: tuple[str, ...]
) -> None:
    """An edit of one that a source includes compiles it anew, one of another header does not."""
    sources = tmp_path / "cuda"
    sources.mkdir()
    (sources / "sample.toml").write_bytes((DATA / "sample.toml").read_bytes())
    (sources / "sample.cu").write_text('#include "asked.cuh"\n')
    for name in ("asked.cuh", "other.cuh"):
        (sources / name).write_text("// one")
    Bench(folder, sources=sources).make()
    (sources / header).write_text("// another")
    assert Bench(folder, sources=sources).make().compiled == compiled


def broken(path: Path, content: bytes) -> None:
    path.write_bytes(content)


CASES = {
    "empty": lambda path: broken(path, b""),
    "cut": lambda path: broken(path, path.read_bytes()[:-1]),
    "a bit": lambda path: broken(path, path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "no header": lambda path: broken(path, cubin("sm_90")),
    "another key": lambda path: broken(path, path.read_bytes().replace(path.stem.encode(), b"0" * 64)),
    "writable": lambda path: path.chmod(0o666),
    "too large": lambda path: broken(path, bytes(MOST + 1)),
}

WORDS = {
    "empty": "not used, is broken or of another kind; compiled again",
    "cut": "not used, has digest ",
    "a bit": "not used, has digest ",
    "no header": "not used, is broken or of another kind; compiled again",
    "another key": "not used, holds 0000000000000000, expected ",
    "writable": "not used, the file may be written by others: mode 666; compiled again",
    "too large": f"not used, is larger than {MOST} bytes; compiled again",
}


@pytest.mark.parametrize("case", CASES)
def test_broken_and_foreign_entries(folder: Path, case: str) -> None:
    """Told once, made again, and whole afterwards."""
    Bench(folder).make()
    path = folder / kept(folder)[0]
    CASES[case](path)
    bench = Bench(folder)
    assert bench.make().compiled == (NAME,)
    assert len(bench.told) == 1
    assert bench.told[0].startswith(WORDS[case])
    again = Bench(folder)
    assert (again.make().kept, again.told) == ((NAME,), [])


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    """Not even to a good file; the link is replaced, what it leads to is left alone."""
    Bench(folder).make()
    path, aside = folder / kept(folder)[0], tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(aside)
    before = aside.read_bytes()
    bench = Bench(folder)
    assert bench.make().compiled == (NAME,)
    assert bench.told == ["not used, a link leads to it; compiled again"]
    assert (path.is_symlink(), aside.read_bytes()) == (False, before)


def test_a_pipe_does_not_stop_the_start(folder: Path) -> None:
    """Reading it would wait for ever."""
    Bench(folder).make()
    path = folder / kept(folder)[0]
    path.unlink()
    os.mkfifo(path, 0o600)
    bench = Bench(folder)
    assert bench.make().compiled == (NAME,)
    assert bench.told == ["not used, is no regular file; compiled again"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_another_owner(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """What another user put there is not loaded into the driver; root's is."""
    Bench(folder).make()
    entry, strange = folder / kept(folder)[0], os.geteuid() + 1
    place = entry if what == "file" else folder
    if os.geteuid() == 0:
        os.chown(place, strange, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: strange)
    bench = Bench(folder)
    assert bench.make().compiled == (NAME,)
    assert bench.image() == cubin("sm_90")
    assert len(bench.told) == 1
    assert bench.told[0].startswith(f"not used, the {what} belongs to user ")


def test_a_folder_that_others_may_write(folder: Path) -> None:
    """Nothing is read from it, and nothing is written into it."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    bench = Bench(folder)
    assert bench.make().compiled == (NAME,)
    assert bench.image() == cubin("sm_90")
    words = "not used, the folder may be written by others: mode 777; compiled kernels are used from memory"
    assert bench.told == [words]
    assert kept(folder) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_full_or_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Compiled, used from memory, told once; nothing half is left behind."""

    class Full:
        def __init__(self, opened: int, mode: str) -> None:
            self.opened = opened

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *raised: object) -> None:
            os.close(self.opened)

        def write(self, content: bytes) -> None:
            os.write(self.opened, content[:100])
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(entries_module, "open", Full, raising=False)
    bench = Bench(folder)
    assert bench.make().compiled == (NAME,)
    assert bench.image() == cubin("sm_90")
    assert bench.told == [f"not written: {os.strerror(number)}; compiled kernels are used from memory"]
    assert kept(folder) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file stands where it should be: as read-only."""
    (tmp_path / "file").write_text("")
    bench = Bench(tmp_path / "file" / "kernels")
    assert bench.make().compiled == (NAME,)
    assert bench.image() == cubin("sm_90")
    assert bench.told == ["not used, cannot be read: Not a directory; compiled kernels are used from memory"]


def test_nothing_is_kept(tmp_path: Path) -> None:
    """Without a folder it is compiled for this process."""
    bench = Bench(None)
    assert (bench.make().compiled, bench.image(), bench.told) == ((NAME,), cubin("sm_90"), [])


def test_threads_compile_once(folder: Path) -> None:
    """Layers that are loaded at the same time wait for the one that compiles."""
    bench = Bench(folder)
    threads = [threading.Thread(target=bench.make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.compiler.asked == [NAME]


PROCESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_compiled as t

bench = t.Bench(Path({folder!r}))
plain = bench.specialiser._compiler
def slow(jobs, headers):
    print("compiling", flush=True)
    time.sleep({seconds})
    return plain(jobs, headers)
bench.specialiser._compiler = slow
made = bench.make()
assert bench.image() == t.cubin("sm_90")
print("done", len(made.compiled), flush=True)
"""


def process(folder: Path, seconds: float, more: str = "") -> subprocess.Popen[str]:
    code = PROCESS.format(tests=str(Path(__file__).parent), folder=str(folder), seconds=seconds)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", more + code], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_two_processes_at_once(folder: Path) -> None:
    """One compiles, the other waits and reads; both have it."""
    with process(folder, 1.0) as one:
        assert one.stdout
        assert one.stdout.readline() == "compiling\n"  # it has the lock now
        with process(folder, 1.0) as two:
            told, other = one.communicate()[0], two.communicate()[0]
    assert (told, other) == ("done 1\n", "done 0\n")
    assert (one.returncode, two.returncode) == (0, 0)


@pytest.mark.slow
def test_killed_while_compiling(folder: Path) -> None:
    """Its lock goes with it; the next start compiles."""
    with process(folder, 60.0) as one:
        assert one.stdout
        assert one.stdout.readline() == "compiling\n"
        one.send_signal(signal.SIGKILL)
    assert kept(folder) == []
    bench = Bench(folder)
    assert (bench.make().compiled, bench.told) == ((NAME,), [])


KILL = """
import os, signal
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_while_writing(folder: Path, lenient: Path) -> None:
    """What it left is never taken for an entry, and goes away once it is old."""
    with process(folder, 0.0, KILL) as one:
        assert one.communicate()[0] == "compiling\n"
    assert one.returncode == -signal.SIGKILL
    left = kept(folder)
    assert [name[-8:] for name in left] == [".partial"]
    bench = Bench(folder)
    assert (bench.make().compiled, bench.told) == ((NAME,), [])
    assert len(kept(folder)) == 2  # a writer may still be at it
    old = folder / left[0]
    os.utime(old, (old.stat().st_mtime - ABANDONED - 1,) * 2)
    Bench(folder, sources=lenient).make("sm_120")
    assert left[0] not in kept(folder)


def test_a_lock_that_is_never_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process holds up nobody for ever: the work is done twice."""
    monkeypatch.setattr(entries_module, "WAIT", 0.2)
    with Entries(folder).locked():
        assert Bench(folder).make().compiled == (NAME,)


def test_no_compiler(folder: Path) -> None:
    """It is known before anything is tried, and an attempt says what to install."""
    bench = Bench(folder, missing="nvrtc: found none: pip install it")
    assert not bench.specialiser.can([bench.job()])
    with pytest.raises(BackendError, match="found none: pip install it"):
        bench.make()
    assert (bench.image(), folder.exists()) == (None, False)


def test_plans_of_one_service_stay_equal(folder: Path) -> None:
    """Whether kernels can be had is answered once: a folder that another process fills meanwhile changes nothing."""
    bench = Bench(folder, missing="none")
    assert not bench.specialiser.can([bench.job()])
    Bench(folder).make()
    assert not bench.specialiser.can([bench.job()])
    assert Bench(folder, missing="none").specialiser.can([bench.job()])


@pytest.mark.parametrize("start", ["first", "second"])
def test_the_gate(folder: Path, tmp_path: Path, start: str) -> None:
    """A kernel that breaks its budget is not used, whether it was compiled just now or kept: every number that
    is more than a matter of speed is named."""
    sources = tmp_path / "cuda"
    sources.mkdir()
    (sources / "sample.cu").write_bytes((DATA / "sample.cu").read_bytes())
    manifest = (DATA / "sample.toml").read_text()
    (sources / "sample.toml").write_text(manifest.replace("registers  = 32", "registers  = 31").replace("256", "248"))
    if start == "second":
        Bench(folder).make()  # the budget is no part of the key: the bytes are the same
    bench = Bench(folder, sources=sources)
    (sources / "sample.toml").write_text((sources / "sample.toml").read_text().replace("hidden = 248", "hidden = 256"))
    with pytest.raises(BackendError) as raised:
        bench.make()
    # a register more costs time only, and the version for any sizes would cost more
    assert str(raised.value) == f"{NAME}: spills: stack 256, at most 248"
    assert bench.image() is None


def test_code_for_another_architecture(folder: Path) -> None:
    """The gate looks at the code itself, not at its name."""
    bench = Bench(folder)
    bench.specialiser._compiler = lambda wanted, headers: {job.key: cubin("sm_120") for job in wanted}
    with pytest.raises(BackendError, match="code for sm_120, expected sm_90"):
        bench.make()


def test_what_does_not_compile(folder: Path) -> None:
    """The compiler's text; nothing is kept or used."""
    bench = Bench(folder)
    bench.compiler.fault = BackendError("sample.cu(7): error: expected a ;")
    with pytest.raises(BackendError, match="expected a ;"):
        bench.make()
    assert (bench.image(), kept(folder)) == (None, [])


def test_beside_a_build(folder: Path, tmp_path: Path) -> None:
    """Made ones go before those for any sizes; other sizes have the build's; so has everything before they are made."""
    bench = Bench(folder)
    general = Version("sample", "sm_90", (), (("late", "no"),))
    images = Extended(
        Cubins.write(tmp_path, "id", "c", Scope(("sm_90",), ()), {general: b"general"}), bench.specialiser
    )
    axes, sizes = {"late": "no"}, SIZES.record()
    assert images.read(images.find("sample", "sm_90", sizes, axes)) == b"general"
    bench.make()
    assert images.read(images.find("sample", "sm_90", sizes, axes)) == cubin("sm_90")
    assert images.read(images.find("sample", "sm_90", {**sizes, "group": 32}, axes)) == b"general"
    assert (images.id, images.of_sources(["sample"])) == ("id", {"sm_90"})


@pytest.mark.parametrize(
    ("sizes", "architecture"),
    [({"hidden": 2000}, "sm_90"), ({"top_k": 17}, "sm_90"), ({}, "sm_60")],
)
def test_what_the_manifest_excludes(folder: Path, sizes: dict[str, int], architecture: str) -> None:
    """Sizes that the kernels cannot run are not compiled, nor is an architecture that no build has."""
    geometry = Geometry(**{**SIZES.record(), **sizes})
    assert Bench(folder).specialiser.job("sample", architecture, geometry, {}) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"XDG_CACHE_HOME": "/there", "HOME": "/home/a"}, "/there/sm70-moe/kernels"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.cache/sm70-moe/kernels"),
        ({"HOME": "/home/a"}, "/home/a/.cache/sm70-moe/kernels"),
    ],
)
def test_the_usual_folder(given: dict[str, str], expected: str) -> None:
    assert str(default_folder(given)) == expected


def layer(order: str = "octet32", architecture: str = "sm_70") -> Layer:
    layout = BankLayout(order, Metadata.THREE_BYTE, SIZES.group, True, True)
    return Layer(BankShape(SIZES.experts, SIZES.hidden, SIZES.intermediate), layout, SIZES.top_k, architecture)


@pytest.mark.parametrize("name", ["qpn", "grouped"])
def test_only_what_a_layer_needs(name: str) -> None:
    """Of the package's own sources: those of its backends' steps, in the layer's own layout alone."""
    specialiser = Specialiser(None, missing=lambda: "")
    found = sorted(job.version.source for job in jobs(specialiser, name, layer()))
    assert found == ["decode_w13", "decode_w2"]
    for job in jobs(specialiser, name, layer()):
        assert {"3-byte", "octet32"} <= {value for _, value in job.version.axes}
        assert {"hidden=2048", "group=128", "sm_70"} <= job.version.labels
        assert not job.version.test


def test_a_layout_without_specialised_versions() -> None:
    """The manifests have this order for any sizes only."""
    assert jobs(Specialiser(None, missing=lambda: ""), "qpn", layer("tile32x8")) == ()


@pytest.mark.slow
@pytest.mark.skipif(bool(nvrtc.missing()), reason="the compiler is not installed")
def test_nvrtc(folder: Path) -> None:
    """The real one, on a layer of the package's own kernels: the bytes that a build gives, again at a second start."""
    specialiser = Specialiser(Entries(folder))
    (job,) = [job for job in jobs(specialiser, "qpn", layer()) if job.version.source == "decode_w13"]
    assert specialiser.make([job], lambda file, text: None).compiled == (job.version.name,)
    (content,) = [Entries(folder).load(job.key).content]
    assert content is not None
    assert {found.architecture for found in census(content)} == {"sm_70"}
    assert {found.kernel for found in census(content)} == set(
        load_manifests(build_module.SOURCES)["decode_w13"].kernels
    )
    build_module.compile_jobs([job], specialiser.headers, folder, 1, lambda done, total: None)
    assert (folder / job.key).read_bytes() == content
    assert Specialiser(Entries(folder)).make([job], lambda file, text: None).kept == (job.version.name,)


@pytest.mark.slow
@pytest.mark.skipif(bool(nvrtc.missing()), reason="the compiler is not installed")
def test_nvrtc_says_what_is_wrong() -> None:
    """The compiler's log, with the option that it was given."""
    version = Version("bad", "sm_70", (), ())
    with pytest.raises(BackendError, match=r"bad\.sm_70\.runtime\.cu \(--gpu-architecture=sm_70\)"):
        module.compiled([Job(version, "no C++", ("--gpu-architecture=sm_70",), "key")], {})
