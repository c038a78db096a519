"""What nobody has foreseen ends a command in one line and a code of its own: never in 1, which is an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from errno import EIO, ENOSPC
from pathlib import Path

import pytest
import typer

from sm70_moe.cli import streams
from sm70_moe.cli.app import COMMANDS
from sm70_moe.errors import PolicyError, SettingsError

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"
SHIPPED = "sample-awq-tp2"

STEPS = {
    "explain": (("explain", TINY), "explain.read_operator"),
    "inspect": (("inspect", TINY), "inspect.open_checkpoint"),
    "prepare": (("prepare", TINY, "out"), "prepare.read_operator"),
    "verify": (("verify", TINY), "verify.check_device"),
    "sample": (("sample", "out"), "sample.geometry"),
    "doctor": (("doctor",), "doctor.read_operator"),
    "demo": (("demo",), "demo.gettempdir"),
    "kernels": (("kernels", TINY), "kernels.Cubins.open"),
    "predict": (("predict",), "predict.load_fitted"),
    "bench": (("bench",), "bench.check_files"),
    "build-kernels": (("build-kernels", "x.toml", "out"), "build_kernels.geometries"),
    "policy": (("policy", "show", SHIPPED), "policy.load_policy"),
    "version": (("version",), "version.line"),
}
"""Command -> how it is called, and a step of its work."""

UNFORESEEN = (
    OSError(EIO, "Input/output error", "/somewhere"),
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    KeyError("a\nerror: forged"),
    BrokenPipeError("a compiler ended"),  # not that of standard output
    SystemExit(1),  # a plug-in's import may do that
    UnicodeEncodeError("ascii", "ü", 0, 1, "ordinal not in range(128)"),
    TimeoutError("nobody answered"),
    AssertionError(),
    RuntimeError("x" * 100_000),
    EOFError(),
    ModuleNotFoundError("No module named 'x'"),
    ExceptionGroup("two", [ValueError(), KeyError()]),
)


def test_every_command_is_broken_once() -> None:
    """The table below has no gap."""
    assert STEPS.keys() == COMMANDS.keys()
    assert len(UNFORESEEN) == len(COMMANDS)


@pytest.mark.parametrize(("name", "error"), [*zip(COMMANDS, UNFORESEEN, strict=True)], ids=COMMANDS)
def test_what_nobody_has_foreseen(command, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """One bounded line that names it and the option that tells more."""

    def broken(*_: object, **__: object) -> None:
        raise error

    arguments, step = STEPS[name]
    monkeypatch.setattr(f"sm70_moe.cli.{step}", broken)
    ended = command(*arguments)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.count("\n") == 1
    assert len(ended.err) < 1_500
    assert type(error).__name__ in ended.err
    assert "--traceback" in ended.err
    whole = command("--traceback", *arguments)
    assert whole.code == 3
    assert [line for line in whole.err.splitlines() if line.startswith("| ") and "in broken" in line]
    assert not [line for line in whole.err.splitlines() if line.startswith("error: forged")]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (SettingsError("one", "two"), 2, ["error: one", "two"]),
        (PolicyError([]), 2, ["error: "]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (typer.Abort(), 130, ["interrupted"]),
        (typer.Exit(1), 1, []),
        (typer.Exit(), 0, []),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_has_a_meaning(command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, told) -> None:
    """Answers, bad input and a person's interrupt keep their codes."""

    def ends(*_: object) -> None:
        raise error

    monkeypatch.setattr("sm70_moe.cli.version.line", ends)
    ended = command("version")
    assert (ended.code, ended.out, ended.err.splitlines()) == (code, "", told)


SHORT = [
    ("version",),
    ("policy", "list"),
    ("policy", "list", "--json"),
    ("policy", "show", SHIPPED),
    ("policy", "check", SHIPPED),
    ("policy", "diff", SHIPPED, SHIPPED),
    ("policy", "schema"),
    ("explain", TINY, "--tp", 2),
    ("explain", TINY, "--json"),
    ("inspect", TINY),
    ("sample", "out", "--headers"),
]


@pytest.mark.parametrize("arguments", SHORT, ids=lambda given: " ".join(map(str, given[:2])).replace(str(TINY), "DIR"))
def test_a_full_disk_and_a_reader_that_leaves(command, monkeypatch, tmp_path: Path, arguments) -> None:
    """Whatever a command prints: an answer that nobody got is none, and `| head` is no error."""
    for error, code, lines in ((OSError(ENOSPC, os.strerror(ENOSPC)), 3, 1), (BrokenPipeError(), 141, 0)):

        def lost(_: str, error: OSError = error) -> None:
            raise streams.OutputLost(error)

        (tmp_path / str(code)).mkdir()
        monkeypatch.chdir(tmp_path / str(code))
        monkeypatch.setattr("sm70_moe.cli.output.write", lost)
        ended = command(*arguments)
        assert (ended.code, ended.out) == (code, "")
        told = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert told == ["error: standard output cannot be written: No space left on device"] * lines


PROGRAM = (sys.executable, "-c", "from sm70_moe.cli.app import main; main()")


def in_shell(line: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A line of sh, in which $P is the program."""
    told = os.environ | {"COLUMNS": "80", "P": PROGRAM[0], "CODE": PROGRAM[2]} | variables
    return subprocess.run(["sh", "-c", line], capture_output=True, env=told, check=False)


RUN = '"$P" -c "$CODE"'


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (f"{RUN} version > /dev/full", 3, b"error: standard output cannot be written: No space left on device\n"),
        (f"{RUN} version --help > /dev/full", 3, b"No space left on device"),
        (f"{RUN} version >&-", 3, b"error: standard output cannot be written: Bad file descriptor\n"),
        (f"{RUN} version >&- 2>&- <&-", 3, b""),
        (f"{RUN} policy show none 2> /dev/full", 2, b""),
        (f"{{ {RUN} policy schema; echo $? >&2; }} | true", 0, b"141\n"),
        (f"{{ {RUN} --help; echo $? >&2; }} | true", 0, b"141\n"),
    ],
)
def test_real_streams(line: str, code: int, told: bytes) -> None:
    """Full, closed, left: one line at most, and Python has nothing to add at its end."""
    ended = in_shell(line)
    assert ended.returncode == code
    assert ended.stderr.count(b"\n") == bool(told)
    assert told in ended.stderr
    assert told.startswith(b"No") or ended.stderr == told


def test_a_closed_stream_is_no_file_of_ours() -> None:
    """With standard output closed, the first file that is opened would have its number."""
    code = (
        "import os; from sm70_moe.cli.streams import make_usable; make_usable(); "
        "f = os.open('/dev/zero', os.O_RDONLY); os.write(2, b'%d' % f)"
    )
    ended = subprocess.run(
        ["sh", "-c", '"$P" -c "$0" <&- >&-', code],
        capture_output=True,
        env={"P": sys.executable} | os.environ,
        check=False,
    )
    assert int(ended.stderr) > 2


def test_names_that_an_encoding_lacks(tmp_path: Path) -> None:
    """They are shown as escapes, on both streams, also those that are no text at all."""
    folder = os.fsencode(tmp_path) + b"/\xc3\xa4\xff"
    line = '"$P" -c "$CODE" sample "$F" --headers --layers 1; "$P" -c "$CODE" inspect "$F/no"'
    ended = in_shell(line, PYTHONIOENCODING="ascii", F=os.fsdecode(folder))
    assert ended.returncode == 2
    assert b"wrote headers of 1 layer to " in ended.stdout
    assert ended.stdout.endswith(b"/\\xe4\\udcff\n")
    assert b"/\\xe4\\udcff/no" in ended.stderr
    assert ended.stdout.isascii()
    assert ended.stderr.isascii()
