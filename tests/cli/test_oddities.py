"""Every way to name a file or folder x everything odd that may stand there: a command ends at once and says why.

No odd thing is unforeseen (exit code 3), waited for, or read without an end.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from sm70_moe import opening

SECONDS = 5
MOST_MEMORY = 2**28
"""Bytes that the process may grow by over all of a way's oddities."""


def loop(path: Path) -> None:
    other = path.with_name("other")
    other.symlink_to(path)
    path.symlink_to(other)


def terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: takes no room


def folder_of(name: str, odd: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        odd(path / name)

    return make


FILES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("gone")),
    "a loop of links": loop,
    "a pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "full": lambda path: path.symlink_to("/dev/full"),
    "a terabyte": terabyte,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 100),
    "a mark and text": lambda path: path.write_bytes(b"\xef\xbb\xbf{}"),
    "deep arrays": lambda path: path.write_text("[" * 100_000),
    "deep tables": lambda path: path.write_text('{"a":' * 100_000),
    "deep TOML": lambda path: path.write_text("a = " + "[" * 5_000 + "]" * 5_000),
    "infinity": lambda path: path.write_text('{"schema": 1e999}'),
    "a text": lambda path: path.write_text('"x"'),
    "null": lambda path: path.write_text("null"),
}
ODD: dict[str, Callable[[Path], Any]] = {
    **FILES,
    "nothing": lambda path: None,
    "an empty folder": Path.mkdir,
    **{
        f"a folder whose {name} is {odd}": folder_of(name, FILES[odd])
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "BUILD.json", "x.toml")
        for odd in ("a pipe", "endless", "a loop of links", "deep arrays", "infinity")
    },
}
"""What stands under a name."""

NAMES = {
    "a long name": "n" * 300,
    "a very long path": "n/" * 3000,
    "no name": "",
    "a NUL": "a\0b",
    "a file above": "f/x",
}
"""Names under which nothing can stand."""

WAYS: dict[str, tuple[str, ...]] = {
    "explain": ("explain", "ODD"),
    "inspect": ("inspect", "ODD"),
    "verify": ("verify", "ODD"),
    "prepare": ("prepare", "ODD", "OUT"),
    "prepare into": ("prepare", "GOOD", "ODD"),
    "explain a policy": ("explain", "GOOD", "--policy", "ODD"),
    "policy check": ("policy", "check", "ODD"),
    "policy show": ("policy", "show", "ODD"),
    "policy diff": ("policy", "diff", "ODD", "generic-awq"),
    "kernels": ("kernels", "ODD"),
    "predict kernels": ("predict", "--kernels", "ODD"),
    "predict compare": ("predict", "--compare", "ODD"),
    "predict fitted": ("predict", "--fitted", "ODD"),
    "build-kernels": ("build-kernels", "ODD", "OUT"),
    "bench layer": ("bench", "--layer", "ODD"),
    "sample": ("sample", "ODD", "--layers", "1"),
    "policies by variable": ("SM70_MOE_POLICY", "explain", "GOOD"),
    "kernels by variable": ("SM70_MOE_KERNELS", "explain", "GOOD"),
    "model types by variable": ("SM70_MOE_MODEL_TYPES", "explain", "GOOD"),
    "cache by variable": ("SM70_MOE_CACHE", "explain", "GOOD"),
    "kernel cache by variable": ("SM70_MOE_KERNEL_CACHE", "explain", "GOOD"),
}
"""A command with the place in it; or a variable that names the place, and a command."""


@contextmanager
def at_once() -> Iterator[None]:
    def late(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt  # which no command takes for an input

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("way", WAYS)
def test_odd_things(command, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Done, no, or bad input in one line each; nothing of the package's own is forgotten under a name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "SILENCE", 0.1)  # of a pipe that a command line names
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told: dict[str, str] = {}
    places = {}
    for number, (name, odd) in enumerate(ODD.items()):
        (tmp_path / str(number)).mkdir()
        places[name] = tmp_path / str(number) / "odd"
        odd(places[name])
    (tmp_path / "f").write_text("")
    for name, place in {**places, **NAMES}.items():
        if "\0" in str(place) and WAYS[way][0].isupper():
            continue  # no variable can hold it
        arguments = [
            str(place) if a == "ODD" else good if a == "GOOD" else tmp_path / "out" if a == "OUT" else a
            for a in WAYS[way]
        ]
        with monkeypatch.context() as patched, at_once():
            if WAYS[way][0].isupper():
                patched.setenv(arguments.pop(0), str(place))
            ended = command(*arguments)
        if ended.code not in (0, 1, 2):
            told[name] = f"{ended.code}: {ended.err[-300:]}"
    assert told == {}
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_MEMORY


def test_a_folder_without_a_name_is_not_the_current_one(command, good: Path, tmp_path: Path, monkeypatch) -> None:
    """`prepare DIR ""` writes nothing into the folder that the shell happens to be in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ended = command("prepare", good, "")
    assert ended.code == 2
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("prepare", "GOOD", "OUT", "--tp", 300_000_000),
        ("prepare", "GOOD", "OUT", "--ep", 300_000_000),
        ("explain", "GOOD", "--tp", 300_000_000),
        ("verify", "GOOD", "--tp", 300_000_000),
        ("sample", "OUT", "--layers", 3_000_000, "--headers"),
        ("bench", "--layer", "GOOD", "--tp", 300_000_000),
    ],
    ids=lambda given: " ".join(map(str, given)),
)
def test_numbers_that_would_take_forever(command, good: Path, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    """Refused before the work."""
    places = {"GOOD": good, "OUT": tmp_path / "out"}
    with at_once():
        ended = command(*(places.get(str(each), each) for each in arguments))
    assert ended.code == 2, ended
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
