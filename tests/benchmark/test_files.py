"""Files at the end of a run: whole or not at all, and named before it if they cannot be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sm70_moe.benchmark.plot import draw, lines, require_matplotlib
from sm70_moe.benchmark.result import Result
from sm70_moe.benchmark.target import check_target, write
from sm70_moe.errors import SettingsError


def test_check_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither the file nor a temporary one; an old file is kept."""
    check_target("--json", tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    check_target("--json", tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize("name", [".", "absent/x.json", "file/x.json", "n" * 300])
def test_places_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    """The option and the place are named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="--json"):
        check_target("--json", tmp_path / name)


def test_endings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"\.png or \.svg"):
        check_target("--plot", tmp_path / "x.gif", (".png", ".svg"))


def test_write_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old file stays if the new one cannot be finished."""
    write("--json", tmp_path / "x", b"one")

    def full(self: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SettingsError, match="No space"):
        write("--json", tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """As /dev/null, or a pipe that somebody reads."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match=r"--json .*pipe"):
        check_target("--json", tmp_path / "pipe")


def test_links_are_followed(tmp_path: Path) -> None:
    """The link stays; one that leads nowhere is named."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere" / "x.json")
    check_target("--json", tmp_path / "link.json")
    write("--json", tmp_path / "link.json", b"one")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "elsewhere" / "x.json").read_bytes() == b"one"
    (tmp_path / "astray.json").symlink_to(tmp_path / "absent" / "x.json")
    with pytest.raises(SettingsError, match=r"--json .*astray"):
        check_target("--json", tmp_path / "astray.json")


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a part nor a broken file."""

    def interrupted(part: str, whole: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write("--json", tmp_path / "x", b"one")
    assert list(tmp_path.iterdir()) == []


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingsError, match=r"sm70-moe\[plot\]"):
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
