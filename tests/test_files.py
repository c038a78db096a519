"""Files at the end of a command: whole or not at all, and named before it if they cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sm70_moe.errors import SettingsError
from sm70_moe.files import check_target, read_json, write


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


def test_a_new_file_is_as_the_umask_says(tmp_path: Path) -> None:
    """Others may read it where they may read other new files."""
    before = os.umask(0o027)
    try:
        write("--json", tmp_path / "x", b"one")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_byte_order_mark_in_json_is_named(tmp_path: Path) -> None:
    """Results and measurements that somebody has edited."""
    path = tmp_path / "run.json"
    path.write_bytes(b"\xef\xbb\xbf[1]")
    with pytest.raises(SettingsError, match=r"byte order mark \(BOM\) of UTF-8.*a list"):
        read_json(path, "a list")
    path.write_bytes(b"[1]")
    assert read_json(path, "a list") == [1]
