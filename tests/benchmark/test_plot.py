"""The picture of a result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sm70_moe.benchmark.plot import draw, lines, require_matplotlib
from sm70_moe.benchmark.result import Result
from sm70_moe.errors import SettingsError


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingsError, match=r"\.\[plot\]"):
        require_matplotlib()


def test_lines_of_a_plot(result: Result) -> None:
    """Whole layers, the fastest roofline, nothing that was wrong."""
    found = {label: [r.microseconds for r in rows] for label, rows in lines(result, "4-byte", "uniform")}
    assert found == {
        "separator plain": [1.0],
        "floor plain": [2.0],
        "roofline plain": [10.0],
        "roofline dependent": [8.0],
        "ours plain": [15.0],
    }
    assert list(lines(result, "3-byte", "uniform")) == []


@pytest.mark.parametrize(("name", "start"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml")])
def test_pictures(result: Result, name: str, start: bytes) -> None:
    """In the format of the name."""
    pytest.importorskip("matplotlib")
    assert draw(result, Path(name)).startswith(start)
