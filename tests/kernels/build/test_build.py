"""Building: which versions there are, what the build id depends on, and what is left when it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels import build as module
from sm70_moe.kernels.build import INSTALLED, SOURCES, build, build_id, expected_id, shipped_scope
from sm70_moe.kernels.build.gate import survey
from sm70_moe.kernels.build.geometry import Geometry, shipped_geometries
from sm70_moe.kernels.build.images import RECORD, Cubins
from sm70_moe.kernels.build.manifest import Argument, load_manifest, load_manifests
from sm70_moe.kernels.build.nvrtc import COMPILER
from sm70_moe.kernels.build.versions import Scope, versions

DATA = Path(__file__).parents[2] / "data" / "kernels"
FIRST = Geometry(hidden=2560, intermediate=160, experts=512, top_k=10, group=32)
SCOPE = Scope(("sm_70", "sm_90"), (FIRST,))

MANIFEST = """
geometry = ["hidden", "group"]
divides  = {{ hidden = 256 }}
{more}
[kernels.k]
arguments = ["x", "n:i32"]
threads = 32
"""


@pytest.fixture
def compiler(lacking: Callable[[str], NoReturn]) -> None:
    """The pinned one."""
    try:
        found = version(COMPILER[0])
    except PackageNotFoundError:
        found = "none"
    if found != COMPILER[1]:
        lacking(f"expected {COMPILER[0]} {COMPILER[1]}, got {found}")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with one source."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "one.cu").write_text("// one")
    (folder / "one.cuh").write_text("// header")
    (folder / "one.toml").write_text(MANIFEST.format(more=""))
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that writes the options it was given; the list gets the name of each version."""
    names: list[str] = []

    def compile_jobs(jobs, headers, store, workers, progress) -> None:
        for job in jobs:
            names.append(job.version.name)
            (store / job.key).write_text(" ".join(job.options))

    monkeypatch.setattr(module, "compile_jobs", compile_jobs)
    return names


def names(folder: Path, scope: Scope) -> list[str]:
    return [version.name for version in versions(load_manifests(folder).values(), scope)]


def test_versions_by_geometry(sources: Path) -> None:
    """One for each different geometry that fits, and one for all others, for each architecture."""
    other = Geometry(hidden=2560, intermediate=64, experts=8, top_k=2, group=32)
    odd = Geometry(hidden=100, intermediate=64, experts=8, top_k=2, group=32)
    assert names(sources, Scope(("sm_70", "sm_90"), (FIRST, other, odd))) == [
        "one.sm_70.hidden2560-group32",
        "one.sm_70.runtime",
        "one.sm_90.hidden2560-group32",
        "one.sm_90.runtime",
    ]


def test_versions_by_axes(sources: Path) -> None:
    """Every value of every axis; those for tests only when asked for, `group` as the policy has it."""
    axes = """
[axes.group]
macro = "MOE_GROUP"
values = { "32" = 32, "128" = 128 }
[axes.step]
macro = "MOE_STEP"
values = { own = 0, volta = 1 }
tests = { volta = ["sm_90"] }
"""
    (sources / "one.toml").write_text(MANIFEST.format(more=axes))
    plain = [
        "one.sm_70.hidden2560-group32.32.own",
        "one.sm_70.runtime.128.own",
        "one.sm_70.runtime.32.own",
        "one.sm_90.hidden2560-group32.32.own",
        "one.sm_90.runtime.128.own",
        "one.sm_90.runtime.32.own",
    ]
    assert names(sources, SCOPE) == plain
    with_tests = names(sources, Scope(SCOPE.architectures, SCOPE.geometries, tests=True))
    assert sorted(set(with_tests) - set(plain)) == [
        "one.sm_90.hidden2560-group32.32.volta",
        "one.sm_90.runtime.128.volta",
        "one.sm_90.runtime.32.volta",
    ]


def test_options(sources: Path, tmp_path: Path, compiled: list[str]) -> None:
    """A specialised version has its sizes as macros, the runtime version has none."""
    made = build(tmp_path / "out", SCOPE, sources=sources)
    texts = {image.version.name: made.read(image).decode() for image in made.images}
    assert texts["one.sm_70.runtime"] == "--gpu-architecture=sm_70 --std=c++17"
    specialised = texts["one.sm_90.hidden2560-group32"]
    assert specialised == "--gpu-architecture=sm_90 --std=c++17 -DMOE_HIDDEN=2560 -DMOE_GROUP=32"


def test_same_input_same_bytes(sources: Path, tmp_path: Path, compiled: list[str]) -> None:
    """Two builds are alike, file by file, the record too."""
    first, second = build(tmp_path / "a", SCOPE, sources=sources), build(tmp_path / "b", SCOPE, sources=sources)
    assert first.id == second.id
    content = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert content[0] == content[1]
    assert sorted(content[0]) == [RECORD, "one.sm_70.xz", "one.sm_90.xz"]


def test_cache(sources: Path, tmp_path: Path, compiled: list[str]) -> None:
    """What was compiled before is not compiled again; an edited header changes what includes it, and nothing else."""
    for _ in range(2):
        build(tmp_path / "out", SCOPE, sources=sources, cache=tmp_path / "cache")
    assert len(compiled) == 4
    (sources / "one.cuh").write_text("// edited")
    build(tmp_path / "out", SCOPE, sources=sources, cache=tmp_path / "cache")
    assert len(compiled) == 4
    (sources / "two.cuh").write_text('  # include "one.cuh"\n')
    (sources / "one.cu").write_text('#include "two.cuh"\n' + (sources / "one.cu").read_text())
    build(tmp_path / "out", SCOPE, sources=sources, cache=tmp_path / "cache")
    (sources / "one.cuh").write_text("// edited again")
    build(tmp_path / "out", SCOPE, sources=sources, cache=tmp_path / "cache")
    assert len(compiled) == 12


@pytest.mark.parametrize("name", ["one.cu", "one.cuh", "one.toml"])
def test_build_id_depends_on_every_source(sources: Path, name: str) -> None:
    """Source, header and manifest."""
    before = build_id(SCOPE, sources)
    with (sources / name).open("a") as file:
        file.write("\n")
    assert build_id(SCOPE, sources) != before


def test_build_id_depends_on_scope_and_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Architectures, geometries, test versions, options and the compiler's version."""
    ids = [
        build_id(scope, sources)
        for scope in (
            SCOPE,
            Scope(("sm_70",), (FIRST,)),
            Scope(SCOPE.architectures, ()),
            Scope(SCOPE.architectures, (FIRST,), tests=True),
        )
    ]
    for name, value in (("OPTIONS", ()), ("COMPILER", "another")):
        monkeypatch.setattr(module, name, value)
        ids.append(build_id(SCOPE, sources))
    assert len(set(ids)) == 6


def test_other_files_do_not_matter(sources: Path) -> None:
    """A note beside the sources is no source."""
    before = build_id(SCOPE, sources)
    (sources / "NOTES.md").write_text("note")
    assert build_id(SCOPE, sources) == before


def test_a_build_replaces_an_earlier_one(sources: Path, tmp_path: Path, compiled: list[str]) -> None:
    """As a whole: nothing of the earlier build stays."""
    out = tmp_path / "out"
    build(out, SCOPE, sources=sources)
    build(out, Scope(("sm_70",), ()), sources=sources)
    assert sorted(path.name for path in out.iterdir()) == [RECORD, "one.sm_70.xz"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_place_below_a_file(sources: Path, tmp_path: Path, compiled: list[str]) -> None:
    """Refused by name before anything is compiled, and the file stays."""
    (tmp_path / "file").write_text("text")
    with pytest.raises(BackendError, match=r"file.*cannot be written"):
        build(tmp_path / "file" / "out", SCOPE, sources=sources)
    assert compiled == []
    assert (tmp_path / "file").read_text() == "text"


def test_nothing_else_is_replaced(sources: Path, tmp_path: Path, compiled: list[str]) -> None:
    """A folder with other contents, a file and a link are refused by name, and stay."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("text")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(folder)
    for name in ("mine", "file", "link"):
        with pytest.raises(BackendError, match=name):
            build(tmp_path / name, SCOPE, sources=sources)
    assert (folder / "thesis.tex").read_text() == "text"


def test_a_failed_build_leaves_the_earlier_one(
    sources: Path, tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, `out` is a whole build."""
    out = tmp_path / "out"
    build(out, SCOPE, sources=sources)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*arguments: object) -> None:
        raise BackendError("does not compile")

    monkeypatch.setattr(module, "compile_jobs", fail)
    with pytest.raises(BackendError):
        build(out, Scope(("sm_70",), ()), sources=sources)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_source_without_manifest(sources: Path, tmp_path: Path) -> None:
    """Both files are needed, and the odd one is named."""
    (sources / "two.cu").write_text("")
    with pytest.raises(BackendError, match="two"):
        build(tmp_path / "out", SCOPE, sources=sources)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("colour = 1", "colour"),
        ("runtime = 1", "runtime"),
        ("architectures = ['sm_60']", "sm_60"),
        ("most = { hidden = 0 }", "most.hidden"),
        ("most = { height = 2 }", "most.height"),
        ("options = [1]", "options"),
        ("[axes.a]\nvalues = { x = 1 }", "axes.a.macro"),
        ("[axes.a]\nmacro = 'A'", "axes.a.values"),
        ("[axes.a]\nmacro = 'A'\nvalues = { x = 1 }\ntests = { y = [] }", "axes.a.tests.y"),
        ("[kernels.other]\nthreads = 2000", "kernels.other.threads"),
        ("[kernels.other]\nthreads = 32\narguments = ['n:i16']", "n:i16"),
        ("[kernels.other]\nthreads = 32\narguments = ['n', 'n:i32']", "kernels.other.arguments"),
        ("[kernels.other]\nthreads = 32\nbudget = { speed = 3 }", "speed"),
        ("[kernels.other]\nthreads = 32\nblocks = 3", "blocks"),
    ],
)
def test_manifests_are_strict(sources: Path, more: str, named: str) -> None:
    """Unknown keys and wrong values are refused; file and key are named."""
    (sources / "one.toml").write_text(MANIFEST.format(more=more))
    with pytest.raises(BackendError) as refused:
        load_manifest(sources / "one.toml")
    assert named in str(refused.value)
    assert "one.toml" in str(refused.value)


def test_manifest() -> None:
    """Arguments, threads and limits as they stand in the file."""
    manifest = load_manifest(DATA / "sample.toml")
    loads = manifest.kernels["loads"]
    assert loads.arguments[2:] == (Argument("out", "ptr"), Argument("words", "i32"))
    assert (loads.threads, loads.shared) == (128, 0)
    assert manifest.misfits({"hidden": 384, "top_k": 32}) == (
        ("hidden", "a multiple of 256"),
        ("top_k", "at most 16"),
    )
    assert manifest.misfits({"top_k": 10}) == ()


def test_shipped_geometries() -> None:
    """Those of the policies with native features, the first contract among them; the generic policy has none."""
    assert FIRST in shipped_geometries()
    assert Geometry(hidden=2048, intermediate=192, experts=128, top_k=8, group=32) in shipped_geometries()


def test_geometry_of_a_policy_that_leaves_sizes_open() -> None:
    """No geometry; and none without a native feature."""
    native = {"q": {"native": True}}
    contract = {"hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2, "weights": {"checkpoint_group": 32}}
    assert Geometry.of_policy({"contract": contract, "features": native}) == Geometry(64, 32, 8, 2, 32)
    assert Geometry.of_policy({"contract": contract | {"expert_parallel": 4}, "features": native}) == Geometry(
        64, 32, 2, 2, 32
    )
    assert Geometry.of_policy({"contract": contract}) is None
    del contract["top_k"]
    assert Geometry.of_policy({"contract": contract, "features": native}) is None


@pytest.mark.usefixtures("compiler")
def test_the_compiler_gives_the_same_bytes_everywhere(tmp_path: Path) -> None:
    """The cubins that the reader's tests count are what the pinned compiler makes of their source."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    for path in (DATA / "sample.cu", DATA / "sample.toml", SOURCES / "stdint.h"):
        shutil.copy(path, folder)
    made = build(tmp_path / "out", Scope(("sm_90", "sm_120"), ()), sources=folder)
    for image in made.images:
        assert made.read(image) == (DATA / f"{image.version.architecture}.cubin").read_bytes()
    assert [row.overruns for row in survey(made, load_manifests(folder)) if row.found.architecture == "sm_90"] == [
        ()
    ] * 3


@pytest.mark.usefixtures("compiler")
def test_a_source_that_does_not_compile(sources: Path, tmp_path: Path) -> None:
    """The compiler's log is in the error, with file and line, and nothing is left."""
    (sources / "one.cu").write_text('extern "C" __global__ void k(int* x, int n) { y = 1; }\n' * 2)
    with pytest.raises(BackendError, match=r"one\.sm_70\.runtime\.cu\(1\)"):
        build(tmp_path / "out", Scope(("sm_70",), ()), sources=sources)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def installed(lacking: Callable[[str], NoReturn]) -> Cubins:
    """The build of this installation, made of these sources."""
    found = Cubins.open(INSTALLED)
    if found is None:
        lacking("this installation has no native build")
    if found.id != expected_id(found, own=True):
        lacking("the build in this checkout is stale")
    return found


def test_installed_machine_code_keeps_its_budgets(installed: Cubins) -> None:
    """Registers, stack, local memory, order of loads, instruction counts, calls, parameters: every cubin."""
    rows = list(survey(installed, load_manifests(SOURCES)))
    assert {row.image.version.name: row.overruns for row in rows if row.overruns} == {}
    assert {row.image for row in rows} == set(installed.images)


def test_installed_build_is_complete(installed: Cubins, lacking: Callable[[str], NoReturn]) -> None:
    """Every version of the shipped scope, and no file that the record does not name."""
    if installed.scope != shipped_scope():
        lacking("the build in this checkout is for another scope")
    wanted = versions(load_manifests(SOURCES).values(), shipped_scope())
    assert [image.version for image in installed.images] == list(wanted)
    files = {path.name for path in installed.folder.iterdir()}
    assert files == {RECORD, *installed.files}


def test_record_is_plain(sources: Path, tmp_path: Path, compiled: list[str]) -> None:
    """What is written is what is read; no time, path or name of a machine stands in it."""
    made = build(tmp_path / "out", SCOPE, sources=sources)
    text = (tmp_path / "out" / RECORD).read_text()
    assert Cubins.open(tmp_path / "out") == made
    assert str(tmp_path) not in text
    assert sorted(json.loads(text)) == ["compiler", "files", "id", "images", "schema", "scope"]
