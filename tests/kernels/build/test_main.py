"""`python -m sm70_moe.kernels.build`, without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import INSTALLED, __main__
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import ARCHITECTURES
from sm70_moe.kernels.build.versions import Scope


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What `build` was asked for."""
    found = {}

    def build(out: Path, scope: Scope, **options: object) -> Cubins:
        found.update(options, out=out, scope=scope)
        return Cubins(out, "b" * 64, "none", scope, {}, ())

    monkeypatch.setattr(__main__, "build", build)
    return found


def test_scope(asked: dict) -> None:
    """Architectures in the usual order, into the package, with the versions for tests."""
    __main__.main(["sm_90", "sm_70", "--tests"])
    assert (asked["out"], asked["scope"].architectures, asked["scope"].tests) == (INSTALLED, ("sm_70", "sm_90"), True)


def test_default_scope(asked: dict) -> None:
    """Everything that is shipped."""
    __main__.main([])
    assert (asked["scope"].architectures, asked["scope"].tests) == (ARCHITECTURES, False)


@pytest.mark.parametrize(("arguments", "named"), [(["sm_71"], "sm_71"), (["--test-it"], "--test-it")])
def test_bad_input(asked: dict, arguments: list, named: str, capsys) -> None:
    """Exit 2, the argument is named, nothing is built."""
    with pytest.raises(SystemExit) as end:
        __main__.main(arguments)
    assert end.value.code == 2
    assert named in capsys.readouterr().err
    assert asked == {}


def test_help(asked: dict, capsys) -> None:
    """Says what may be asked for, and builds nothing."""
    with pytest.raises(SystemExit) as end:
        __main__.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--tests" in out
    assert "sm_70" in out
    assert asked == {}


def test_what_cannot_be_built(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Exit 2 with the reason, no traceback."""

    def build(*_: object, **__: object) -> Cubins:
        raise BackendError("no compiler")

    monkeypatch.setattr(__main__, "build", build)
    with pytest.raises(SystemExit) as end:
        __main__.main(["sm_70"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: no compiler\n"


def test_cache_is_the_checkouts(asked: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of the folder that it is called from; none beside an installed package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "pyproject.toml").touch()
    monkeypatch.setattr(__main__, "ROOT", tmp_path / "checkout")
    __main__.main([])
    assert asked["cache"] == tmp_path / "checkout" / "build" / "kernels"
    monkeypatch.setattr(__main__, "ROOT", tmp_path)
    __main__.main([])
    assert asked["cache"] is None
