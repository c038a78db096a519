"""A folder of kernels is code: one that others may write, or that is another user's, is not loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.build import replaced
from sm70_moe.kernels.build.images import RECORD, Cubins
from sm70_moe.kernels.build.trust import check_own
from sm70_moe.kernels.build.versions import Scope, Version
from sm70_moe.kernels.native.launch import Launcher
from sm70_moe.machine.installed import installed_build

VERSION = Version("sample", "sm_70", (), (("metadata", "4-byte"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kernels"
    made.mkdir(mode=0o755)
    Cubins.write(made, "an id", "a compiler", Scope(("sm_70",), ()), {VERSION: b"code"})
    return made


@pytest.mark.parametrize("name", ["", RECORD, "sample.sm_70.xz"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write(folder: Path, name: str, mode: int) -> None:
    """The folder, its record and each packed file, for the group and for everybody: refused wherever code is loaded."""
    assert installed_build(folder) is not None
    path = folder / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(SettingsError, match=f"{path}: others may write it"):
        installed_build(folder)
    with pytest.raises(BackendError, match=f"{path}: others may write it"):
        Launcher.open("cuda:0", folder, driver=object())


def test_what_is_another_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's is accepted, since root could do anything anyway."""
    mine = os.stat(folder).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    if mine == 0:
        check_own(folder, [RECORD])
        os.chown(folder / RECORD, 12345, -1)
    with pytest.raises(BackendError, match="belongs to user"):
        check_own(folder, [RECORD])


def test_what_is_built_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        with replaced(tmp_path / "out") as fresh:
            (fresh / RECORD).write_text("{}")
    finally:
        os.umask(before)
    check_own(tmp_path / "out", [RECORD])
    assert (tmp_path / "out" / RECORD).stat().st_mode & 0o777 == 0o644
