"""The fit: right on what it knows, honest about what it does not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.errors import SettingsError
from sm70_moe.prediction.fit import fit, gpu_named, points_of, solve, write_fitted
from sm70_moe.prediction.hardware import GPUS
from sm70_moe.prediction.layer import microseconds
from sm70_moe.prediction.measurements import Run, load_run, run_of
from sm70_moe.prediction.parameters import BOUNDS, NAMES, Fitted, Parameters, load_fitted
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.timings import SEPARATOR

H200 = GPUS["h200"]


def test_finds_the_numbers_that_made_the_measurements(run: Run, hopper: ReadBuild, call) -> None:
    """Times made by the model itself give its parameters back."""
    truth = Parameters(launch=0.7, reached=0.88, efficiency=0.6, serial=0.4, latency=1.5, hidden=0.6)
    points = points_of(run, hopper, call(1).geometry, H200)
    made = [
        replace(p, row=replace(p.row, microseconds=p.separator + microseconds(p.row, p.works, H200, truth)))
        for p in points
    ]
    found = solve(made, H200)
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.01)


def test_left_out_errors(fitted: Fitted) -> None:
    """Four numbers of tokens left out in turn: 6.5 % as a root mean square, 14 % at worst."""
    assert list(fitted.left_out) == ["1", "2", "4", "8"]
    assert fitted.spread < 0.08
    assert fitted.worst < 0.18


def test_nothing_ends_at_a_bound(fitted: Fitted) -> None:
    """Each number is one that the measurements wanted, not one that it was stopped at."""
    assert fitted.bounded == ()


def test_left_out_layers(fitted: Fitted) -> None:
    """Our kernels with uniform routing, the rows that a V100 would have: within 12 % of an M that was not fitted."""
    errors = [
        error
        for rows in fitted.left_out.values()
        for name, error in rows.items()
        if name.startswith("ours plain both") and name.endswith("uniform")
    ]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.12


def test_residuals_are_no_larger_than_left_out_errors(fitted: Fitted) -> None:
    """Fitting a row cannot make it worse than not seeing it, over all rows."""
    mean = (sum(e * e for e in fitted.residuals.values()) / len(fitted.residuals)) ** 0.5
    assert mean <= fitted.spread


def test_deterministic(run: Run, hopper: ReadBuild, fitted: Fitted, call) -> None:
    """The same measurements, the same numbers."""
    assert fit(run, hopper, call(1).geometry, H200, "2026-11-29") == fitted


def test_written_and_read(fitted: Fitted, tmp_path: Path) -> None:
    """The file holds everything, and nothing else is left in the folder."""
    write_fitted(fitted, tmp_path / "made.json")
    assert load_fitted(tmp_path / "made.json") == fitted
    assert [path.name for path in tmp_path.iterdir()] == ["made.json"]


def test_the_packages_own_numbers() -> None:
    """They are there, within their bounds, and say where they come from."""
    own = load_fitted()
    for name in NAMES:
        low, high = BOUNDS[name]
        assert low <= getattr(own.parameters, name) <= high
    assert "H200" in own.gpu
    assert own.source
    assert 0 < own.spread < 0.15


def test_numbers_that_cannot_be_written(fitted: Fitted, tmp_path: Path) -> None:
    """A missing folder and a folder in the file's place; nothing is left behind."""
    (tmp_path / "taken.json").mkdir()
    for place in (tmp_path / "none" / "made.json", tmp_path / "taken.json"):
        with pytest.raises(SettingsError, match=place.name):
            write_fitted(fitted, place)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]


def test_numbers_are_written_as_other_files(fitted: Fitted, tmp_path: Path) -> None:
    """With the mode that the umask gives; links are followed, and what is no file is not replaced."""
    before = os.umask(0o022)
    try:
        write_fitted(fitted, tmp_path / "made.json")
    finally:
        os.umask(before)
    assert (tmp_path / "made.json").stat().st_mode & 0o777 == 0o644
    (tmp_path / "link.json").symlink_to("made.json")
    write_fitted(fitted, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="pipe"):
        write_fitted(fitted, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_full_disk(fitted: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old file stays, and no part of the new one."""
    (tmp_path / "made.json").write_text("old")

    def full(part: object, whole: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SettingsError, match="No space"):
        write_fitted(fitted, tmp_path / "made.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("made.json", "old")]


def test_times_of_other_code(run: Run, hopper: ReadBuild, call) -> None:
    """Both builds are named; a file that says where its numbers come from is believed."""
    with pytest.raises(SettingsError, match=rf"by hand.*{hopper.cubins.id}"):
        fit(replace(run, documented=False), hopper, call(1).geometry, H200, "")


def test_times_of_another_geometry(run: Run, hopper: ReadBuild, call) -> None:
    """The model is asked about one geometry."""
    other = replace(call(1).geometry, group=64)
    with pytest.raises(SettingsError, match="64"):
        fit(replace(run, geometry=other), hopper, call(1).geometry, H200, "")


def test_times_that_no_numbers_describe(run: Run, hopper: ReadBuild, call) -> None:
    """Nothing is written that nobody could load."""
    rows = tuple(replace(row, microseconds=0.02) for row in run.rows if row.arm != SEPARATOR)
    with pytest.raises(SettingsError, match="no fit"):
        fit(replace(run, rows=rows), hopper, call(1).geometry, H200, "")


def test_slow_separator(run: Run, hopper: ReadBuild, call) -> None:
    """A row takes longer than the separating kernel that it includes."""
    rows = tuple(replace(row, microseconds=1e5) if row.arm == SEPARATOR else row for row in run.rows)
    with pytest.raises(SettingsError, match="100000"):
        fit(replace(run, rows=rows), hopper, call(1).geometry, H200, "")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "parameters": {}}'])
def test_damaged_numbers(content: str, tmp_path: Path) -> None:
    """The file is named."""
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(SettingsError, match=r"bad\.json"):
        load_fitted(tmp_path / "bad.json")
    with pytest.raises(SettingsError, match=r"bad\.json"):
        load_run(tmp_path / "bad.json")


def test_measurements_of_another_gpu(run: Run, hopper: ReadBuild, call) -> None:
    """A fit on a V100's times would be one of an H200's code."""
    with pytest.raises(SettingsError, match="Tesla V100"):
        fit(replace(run, gpu="Tesla V100-SXM2-16GB"), hopper, call(1).geometry, H200, "")


def test_too_few_rows(run: Run, hopper: ReadBuild, call) -> None:
    """Six numbers take at least twelve rows."""
    with pytest.raises(SettingsError, match="12"):
        fit(replace(run, rows=run.rows[:8]), hopper, call(1).geometry, H200, "")


ROW = {
    "arm": "ours",
    "launch": "plain",
    "part": "both",
    "metadata": "4-byte",
    "tokens": 4,
    "routing": "uniform",
    "distinct": 38.8,
    "microseconds": 18.0,
}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, 1),
        ({"launch": "eager"}, 0),
        ({"arm": "legacy"}, 0),
        ({"tokens": 16}, 0),
        ({"routing": "half-shared"}, 0),
        ({"verdict": "wrong: not finite"}, 0),
        ({"verdict": "right"}, 1),
    ],
)
def test_rows_that_the_model_speaks_of(change: dict, kept: int) -> None:
    """Graphs of few tokens with right results."""
    record = {"schema": 1, "gpu": {"name": "NVIDIA H200"}, "build": "b", "policy": "p", "rows": [ROW | change]}
    assert len(run_of(record, "test").rows) == kept


def test_fastest_shape_counts() -> None:
    """Two rows of one name are two shapes of a roofline."""
    rows = [ROW | {"arm": "roofline", "microseconds": time} for time in (12.0, 11.0, 13.0)]
    record = {"schema": 1, "gpu": {"name": "x"}, "build": "b", "policy": "p", "rows": rows}
    assert [row.microseconds for row in run_of(record, "test").rows] == [11.0]


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16"),
        ("Tesla V100S-PCIE-32GB", None),
        ("Tesla T4", None),
    ],
)
def test_names_that_drivers_give(name: str, gpu: str | None) -> None:
    """Others are not mistaken for them."""
    found = gpu_named(name)
    assert (found.name if found else None) == gpu


def test_the_data_says_that_it_is_by_hand(run: Run) -> None:
    """Nobody takes it for a file from a device."""
    path = Path(__file__).parents[1] / "data" / "prediction" / "h200-run9.json"
    assert json.loads(path.read_text())["build"] == run.build == "by hand"
