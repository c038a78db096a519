"""`predict`, on a build that stays as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.native.launch import Step
from sm70_moe.prediction.program import Program, steps_of
from sm70_moe.prediction.work import Call

DATA = Path(__file__).parents[1] / "data" / "prediction"
BUILD, RUN = DATA / "build", DATA / "h200-run9.json"


def frozen_steps(call: Call, architecture: str) -> tuple[Step, ...]:
    """What was launched for the first contract when the build was kept; the sources have gone on since."""
    steps = json.loads((DATA / "steps.json").read_text())
    if str(call.tokens) not in steps:
        return steps_of(call, architecture)
    axes = {"metadata": str(call.metadata), "order": "octet32"}
    return tuple(Step(source, kernel, grid=tuple(grid), axes=axes) for source, kernel, grid in steps[str(call.tokens)])


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the kept build have its own manifests and steps."""
    real = Program.open

    def opened(folder: Path | None, architecture: str) -> Program:
        return replace(real(folder, architecture), manifests=load_manifests(DATA / "manifests"), steps=frozen_steps)

    monkeypatch.setattr(Program, "open", opened)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fitted") / "made.json"


@pytest.fixture
def fitted(command, numbers: Path) -> Path:
    """Numbers fitted by the command itself, once."""
    if not numbers.exists():
        ended = command("predict", "--kernels", BUILD, "--fit", RUN, numbers)
        assert ended.code == 0, ended.err
        assert "43 rows of NVIDIA H200" in ended.out
    return numbers


def test_first_line_says_that_it_is_a_prediction(command, fitted: Path) -> None:
    """And the second how good the model was where it could be checked."""
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted)
    assert ended.code == 0, ended.err
    first, second, *_ = ended.out.splitlines()
    assert first.startswith("predicted, never run on a V100")
    assert "NVIDIA H200" in second
    assert "%" in second
    assert "less than 8 %" in ended.out.splitlines()[-1]


def test_table_has_a_row_for_each_kernel(command, fitted: Path) -> None:
    """Two kernels for each number of tokens, then the layer's range."""
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1, "--tokens", 8)
    rows = [line.split()[:2] for line in ended.out.splitlines()[4:]]
    assert rows[:4] == [["1", "w13_1"], ["1", "w2_1"], ["8", "w13_8"], ["8", "w2_8"]]
    assert [row[0] for row in rows[5:7]] == ["1", "8"]


def test_json(command, fitted: Path) -> None:
    """The same with everything that was counted."""
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1, "--json")
    report = json.loads(ended.out)
    assert report["label"] == "predicted, never run on a V100"
    assert report["fitted"]["build"] == "by hand"
    (made,) = report["predictions"]
    assert made["label"] == report["label"]
    assert made["microseconds"]["low"] <= made["microseconds"]["likely"] <= made["microseconds"]["high"]
    assert made["floor_nominal"] <= made["microseconds"]["low"]
    assert [kernel["kernel"] for kernel in made["kernels"]] == ["w13_1", "w2_1"]
    assert [kernel["bytes"] for kernel in made["kernels"]] == [5_120_000, 2_560_000]


@pytest.mark.parametrize(("microseconds", "code"), [(20.0, 0), (200.0, 1)])
def test_comparison(command, fitted: Path, tmp_path: Path, microseconds: float, code: int) -> None:
    """Exit 1 if a V100 was seen to be outside of the range."""
    row = {
        "arm": "ours",
        "launch": "plain",
        "part": "both",
        "metadata": "4-byte",
        "tokens": 1,
        "routing": "uniform",
        "distinct": 10.0,
        "microseconds": microseconds,
    }
    record = {"schema": 1, "gpu": {"name": "Tesla V100-SXM2-16GB"}, "build": "b", "policy": "p", "rows": [row]}
    (tmp_path / "report.json").write_text(json.dumps(record))
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted, "--compare", tmp_path / "report.json")
    ended = command(*arguments, "--json")
    assert ended.code == code
    (found,) = json.loads(ended.out)["rows"]
    assert found["measured"] == microseconds
    assert found["inside"] is (code == 0)
    assert command(*arguments).code == code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gpu", "v200"), "v100-sxm2-16"),
        (("--tokens", 9), "1 to 8"),
        (("--policy", "generic-awq"), "generic-awq"),
        (("--policy", "nobody"), "nobody"),
        (("--routing", "random"), "uniform"),
        (("--fitted", "none.json"), "none.json"),
        (("--fit", "none.json", "out.json"), "none.json"),
        (("--compare", "none.json"), "none.json"),
    ],
)
def test_bad_input(command, arguments: tuple, named: str, tmp_path: Path, monkeypatch) -> None:
    """Exit 2, the thing is named, nothing is written."""
    monkeypatch.chdir(tmp_path)
    ended = command("predict", "--kernels", BUILD, *arguments)
    assert ended.code == 2
    assert named in ended.err
    assert list(tmp_path.iterdir()) == []


def test_no_build(command, tmp_path: Path) -> None:
    """A clear error: there is nothing to read."""
    ended = command("predict", "--kernels", tmp_path)
    assert ended.code == 2
    assert "no native build" in ended.err
