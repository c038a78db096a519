"""Runs commands in this process, as the console script would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from sm70_moe.cli.app import main

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """command("explain", folder, "--tp", 2) -> Ended."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr("sys.argv", ["sm70-moe", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        structlog.reset_defaults()
        out, err = capsys.readouterr()
        return Ended(end.value.code or 0, out, err)

    return run


@pytest.fixture(autouse=True)
def _no_build(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A native build that this checkout may have does not count, unless a test asks for `own_build`."""
    if "own_build" not in request.fixturenames:
        monkeypatch.setattr("sm70_moe.machine.probe.installed_build", lambda *_, **__: None)
