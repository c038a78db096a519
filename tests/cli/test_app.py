"""Commands are imported when they are asked for, and nobody can tell."""

from __future__ import annotations

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
    """The program itself needs no command's modules."""
    code = "import sys, sm70_moe.cli.app as a; print(*sorted(m for m in sys.modules if m.startswith('sm70_moe.cli.')))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["sm70_moe.cli.app"]
