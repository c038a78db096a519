"""Reading fitted numbers: those that mean nothing are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm70_moe.errors import SettingsError
from sm70_moe.prediction.parameters import BOUNDS, FITTED, load_fitted

OWN = json.loads(FITTED.read_text(encoding="utf-8"))
NAN, INFINITY = float("nan"), float("inf")


def assert_refused(record: object, folder: Path, named: str) -> None:
    (folder / "bad.json").write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(SettingsError, match=rf"(?s)bad\.json.*{named}.*accepted is"):
        load_fitted(folder / "bad.json")


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY, -0.1, 3.1, 10**400, "1", None, True])
def test_numbers_out_of_bounds(name: str, value: object, tmp_path: Path) -> None:
    """Each number has its own meaning, and its own bounds."""
    assert_refused(OWN | {"parameters": OWN["parameters"] | {name: value}}, tmp_path, name)


def test_no_efficiency(tmp_path: Path) -> None:
    """Nothing would ever be issued."""
    assert_refused(OWN | {"parameters": OWN["parameters"] | {"efficiency": 0}}, tmp_path, "efficiency")


@pytest.mark.parametrize("value", [{}, [], {"1": {}}, {"1": []}, None, {"1": {"row": NAN}}, {"1": {"row": 1e300}}])
def test_no_left_out_errors(value: object, tmp_path: Path) -> None:
    """How wrong a prediction may be would not be known."""
    assert_refused(OWN | {"left_out": value}, tmp_path, "")


@pytest.mark.parametrize("key", ["residuals", "checks"])
@pytest.mark.parametrize("value", [[], 1, {"row": NAN}, {"row": -2}, {"row": "1"}])
def test_other_errors(key: str, value: object, tmp_path: Path) -> None:
    """Numbers from -1 on."""
    assert_refused(OWN | {key: value}, tmp_path, "")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema":' * 100_000, "null", "1", "[]", '{"schema": 1}'])
def test_files_of_no_fit(text: str, tmp_path: Path) -> None:
    """Deep, or of another kind."""
    assert_refused(text, tmp_path, "")


def test_bounds_are_accepted(tmp_path: Path) -> None:
    """A fit may end at them."""
    for side in (0, 1):
        numbers = {name: both[side] for name, both in BOUNDS.items()}
        (tmp_path / "edge.json").write_text(json.dumps(OWN | {"parameters": numbers}))
        assert load_fitted(tmp_path / "edge.json").bounded == tuple(BOUNDS)
