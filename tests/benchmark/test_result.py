"""Rows, ratios, and the JSON form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.benchmark.result import Result, Row, load_result
from sm70_moe.errors import SettingsError


def test_median_and_spread(row: Callable[..., Row], result: Result) -> None:
    """Of all samples; the rate counts the whole time."""
    one = row("ours", 20.0)
    assert (one.microseconds, one.spread, one.samples) == (20.0, 3.0, (19.0, 20.0, 22.0))
    assert one.gigabytes_per_second == pytest.approx(1489.92)
    assert result.rows[0].gigabytes_per_second is None


def test_ratios(result: Result) -> None:
    """To the fastest plain roofline of the same part and bytes, and to the floor beside it; else none."""
    by = {(r.arm, r.launch, r.part, r.metadata): result.ratio(r) for r in result.rows}
    assert by["ours", "plain", "both", "4-byte"] == 1.5
    assert by["ours", "plain", "w13", "4-byte"] == 1.5
    assert by["roofline", "dependent", "both", "4-byte"] == 0.8
    assert by["ours", "plain", "both", "3-byte"] is None
    assert result.floor_ratio(result.rows[6]) == 7.5
    assert result.floor_ratio(result.rows[8]) is None
    assert result.floor == 2.0


def test_an_eager_time_has_no_ratio(row: Callable[..., Row], result: Result) -> None:
    """It is the host's as well: no graph's time stands under it."""
    eager = row("legacy", 900.0, launch="eager")
    assert (result.ratio(eager), result.floor_ratio(eager)) == (None, None)


def test_ok(result: Result) -> None:
    """One wrong row, or none at all, is no good result."""
    assert not result.ok
    assert replace(result, rows=result.rows[:8]).ok
    assert not replace(result, rows=()).ok


def test_the_agreed_form(result: Result) -> None:
    """What other programs read."""
    record = json.loads(json.dumps(result.record()))
    assert {"schema", "gpu", "build", "policy", "rows", "floor"} <= record.keys()
    assert record["schema"] == 1
    assert record["rows"][6] == {
        "arm": "ours",
        "launch": "plain",
        "part": "both",
        "metadata": "4-byte",
        "tokens": 4,
        "routing": "uniform",
        "distinct": 38.8,
        "bytes": 29798400,
        "microseconds": 15.0,
        "spread": 3.0,
        "samples": [14.0, 15.0, 17.0],
        "shape": None,
        "layers": 0,
        "verdict": "right",
        "gigabytes_per_second": pytest.approx(1986.56),
        "ratio": 1.5,
        "floor_ratio": 7.5,
    }


def test_round_trip(result: Result, tmp_path: Path) -> None:
    """What was written is what is read, unknown keys kept."""
    (tmp_path / "result.json").write_text(json.dumps(result.record()))
    assert load_result(tmp_path / "result.json") == result


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1}', "{", '{"schema": 1, "rows": 3}'])
def test_files_that_are_no_result(tmp_path: Path, text: str) -> None:
    """The error names the file."""
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(SettingsError, match=r"odd\.json"):
        load_result(tmp_path / "odd.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"microseconds": float("nan")},
        {"microseconds": float("inf")},
        {"microseconds": -1.0},
        {"microseconds": 0.0},
        {"microseconds": "fast"},
        {"microseconds": None},
        {"tokens": "4"},
        {"samples": [1.0, float("nan")]},
        {"samples": 3},
        {"verdict": 1},
    ],
)
def test_rows_that_are_none(result: Result, tmp_path: Path, changes: dict[str, object]) -> None:
    """Wrong types, and times that no device can take."""
    record = result.record()
    (tmp_path / "odd.json").write_text(json.dumps(record | {"rows": [{**record["rows"][0], **changes}]}))
    with pytest.raises(SettingsError, match=r"odd\.json.*Row"):
        load_result(tmp_path / "odd.json")


def test_a_file_without_end(tmp_path: Path) -> None:
    """Brackets that open and open are an error like any other."""
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(SettingsError, match=r"deep\.json"):
        load_result(tmp_path / "deep.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.json"):
        load_result(tmp_path / "absent.json")
