"""`kernels` and `build-kernels`, on builds that tests make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm70_moe.kernels import build as module
from sm70_moe.kernels.build.images import RECORD, Cubins

DATA = Path(__file__).parents[1] / "data" / "kernels"
POLICY = Path(__file__).parents[2] / "policies" / "qwen3-30b-a3b-awq-tp4.toml"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample as the only source; compiling gives the cubin that is stored beside it."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    for name in ("sample.cu", "sample.toml"):
        (folder / name).write_bytes((DATA / name).read_bytes())

    def compile_jobs(jobs, headers, store, workers, progress) -> None:
        for count, job in enumerate(jobs, start=1):
            (store / job.key).write_bytes((DATA / f"{job.version.architecture}.cubin").read_bytes())
            progress(count, len(jobs))

    monkeypatch.setattr(module, "compile_jobs", compile_jobs)
    for where in ("sm70_moe.kernels.build", "sm70_moe.cli.kernels"):
        monkeypatch.setattr(f"{where}.SOURCES", folder)
    return folder


def build(command, out: Path, *more: str) -> None:
    ended = command("build-kernels", POLICY, out, "--arch", "sm_90", *more)
    assert ended.code == 0, ended.err


def test_build_for_a_policy(command, sources: Path, tmp_path: Path) -> None:
    """Its geometry and the runtime version, for the architectures that were asked for."""
    build(command, tmp_path / "out")
    made = Cubins.open(tmp_path / "out")
    assert made is not None
    names = [image.version.name for image in made.images]
    assert names == ["sample.sm_90.hidden2048-group32.no", "sample.sm_90.runtime.no"]


def test_table_as_json(command, sources: Path, tmp_path: Path) -> None:
    """Every kernel of every cubin with its numbers; exit 0 where all budgets are kept."""
    build(command, tmp_path / "out")
    ended = command("kernels", tmp_path / "out", "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert report["stale"] is False
    kernels = [(row["kernel"], row["calls"], row["stack"], row["overruns"]) for row in report["kernels"]]
    assert kernels == [("loads", 0, 0, []), ("spills", 0, 256, []), ("volta", 4, 0, [])] * 2


def test_table(command, sources: Path, tmp_path: Path) -> None:
    """The same for a person, cut down to one kernel."""
    build(command, tmp_path / "out")
    ended = command("kernels", tmp_path / "out", "--kernel", "spills")
    rows = [line.split() for line in ended.out.splitlines() if line.startswith(("spills", "loads"))]
    assert [row[:4] for row in rows] == [
        ["spills", "sm_90.hidden2048-group32.no", "34", "256"],
        ["spills", "sm_90.runtime.no", "34", "256"],
    ]


@pytest.mark.parametrize(("option", "there"), [("--arch", "sm_90"), ("--kernel", "spills")])
def test_a_choice_that_is_not_there(command, sources: Path, tmp_path: Path, option: str, there: str) -> None:
    """Exit 2: an empty table would look like a build without kernels."""
    build(command, tmp_path / "out")
    ended = command("kernels", tmp_path / "out", option, "none")
    assert ended.code == 2
    assert f"{option} 'none'" in ended.err
    assert there in ended.err


def test_the_setting_names_the_build(command, sources: Path, tmp_path: Path, monkeypatch) -> None:
    """Without an argument it is the build in use."""
    build(command, tmp_path / "out")
    monkeypatch.setenv("SM70_MOE_KERNELS", str(tmp_path / "out"))
    assert str(tmp_path / "out") in command("kernels").out


def test_exceeded_budget(command, sources: Path, tmp_path: Path) -> None:
    """Exit 1, and the number stands in the table."""
    manifest = sources / "sample.toml"
    manifest.write_text(manifest.read_text().replace("registers  = 32", "registers  = 31"))
    build(command, tmp_path / "out")
    ended = command("kernels", tmp_path / "out", "--json")
    assert ended.code == 1
    overruns = [row["overruns"] for row in json.loads(ended.out)["kernels"] if row["kernel"] == "loads"]
    assert overruns == [["registers 32, at most 31"]] * 2


def test_stale_build(command, sources: Path, tmp_path: Path) -> None:
    """It is shown, and called stale."""
    build(command, tmp_path / "out")
    with (sources / "sample.cu").open("a") as file:
        file.write("// edited\n")
    assert json.loads(command("kernels", tmp_path / "out", "--json").out)["stale"] is True


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("kernels", "nowhere"), "nowhere"),
        (("build-kernels", "generic-awq", "out"), "generic-awq"),
        (("build-kernels", POLICY.with_name("generic-awq.toml"), "out"), "native"),
        (("build-kernels", POLICY.with_name("none.toml"), "out"), "none.toml"),
        (("build-kernels", POLICY, "out", "--arch", "sm_60"), "sm_60"),
    ],
)
def test_bad_input(command, arguments: tuple, named: str, tmp_path: Path, monkeypatch) -> None:
    """Exit 2, and the thing is named; nothing is written."""
    monkeypatch.chdir(tmp_path)
    ended = command(*arguments)
    assert ended.code == 2
    assert named in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_things_is_left_alone(command, sources: Path, tmp_path: Path) -> None:
    """Exit 2."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("text")
    assert command("build-kernels", POLICY, tmp_path / "mine").code == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["text"]
    assert RECORD not in [path.name for path in tmp_path.rglob("*")]
