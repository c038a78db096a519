"""Commands are imported when they are asked for, and nobody can tell."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from sm70_moe.cli.app import COMMANDS


def test_every_command_is_there(command) -> None:
    """Each has a line of help, in the order of the table."""
    ended = command("--help")
    assert ended.code == 0
    assert re.findall(r"^\W*([a-z]+(?:-[a-z]+)?)  +[A-Z]", ended.out, re.MULTILINE) == [*COMMANDS]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(command, name: str) -> None:
    """Under its own name, without options of the program."""
    ended = command(name, "--help")
    assert ended.code == 0
    assert f"sm70-moe {name}" in ended.out
    assert "--install-completion" not in ended.out


@pytest.mark.parametrize(("typed", "meant"), [("explan", "explain"), ("build-kernel", "build-kernels")])
def test_a_mistyped_command_is_recognised(command, typed: str, meant: str) -> None:
    """The nearest name is told, although no command was imported."""
    ended = command(typed)
    assert ended.code == 2
    assert f"'{meant}'" in ended.err


def test_a_name_like_no_other(command) -> None:
    """Refused, with nothing suggested."""
    ended = command("zzz")
    assert ended.code == 2
    assert "mean" not in ended.err


def test_nothing_is_imported_beforehand() -> None:
    """The program itself needs no command's modules, only those that tell how it ends."""
    code = "import sys, sm70_moe.cli.app as a; print(*sorted(m for m in sys.modules if m.startswith('sm70_moe.cli.')))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [f"sm70_moe.cli.{name}" for name in ("app", "ending", "output", "streams")]


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_pipe_is_no_terminal_whatever_is_said(command, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """CI asks for colours; a table is cut to a terminal's width on a terminal alone."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv(name, "1")
    rows = [line for line in command("policy", "list").out.splitlines() if "qwen3.8-flash-next-awq-tp4" in line]
    assert len(rows) == 1
    assert "Qwen3.8 Flash-Next experts on four V100" in rows[0]


def test_a_stream_that_cannot_write_every_sign() -> None:
    """What stands there instead is no reason to end: a narrow help has an ellipsis."""
    code = "import sys; from sm70_moe.cli.app import main; sys.argv[1:] = ['explain', '--help']; main()"
    told = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, env=told, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\u2026" in ended.stdout
