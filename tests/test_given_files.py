"""Files that somebody names: whatever stands under the name, an error of the reader's own, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.checkpoint.model_types import read_model_types
from sm70_moe.errors import PolicyError, SettingsError
from sm70_moe.policy import load_policy
from sm70_moe.settings.given import read_env_file


def loop(path: Path) -> None:
    other = path.with_name("other")
    other.symlink_to(path)
    path.symlink_to(other)


def too_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: takes no room


ODD: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to(path.with_name("gone")),
    "a loop of links": loop,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte": too_long,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "nested deeply": lambda path: path.write_text("a = " + "[" * 5000 + "]" * 5000),
}
READERS: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "policy": (lambda path: load_policy(str(path)), PolicyError),
    ".env": (read_env_file, SettingsError),
    "model types": (read_model_types, SettingsError),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_every_oddity_is_the_readers_own_error(reader: str, odd: str, tmp_path: Path) -> None:
    """It names the file; nothing is read without an end."""
    path = tmp_path / "given.toml"
    ODD[odd](path)
    read, error = READERS[reader]
    if (reader, odd) == (".env", "nested deeply"):
        assert read(path) == {}  # a line of another program's
        return
    with pytest.raises(error, match=r"given\.toml"):
        read(path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000 + "a.toml", "nul\0.toml"])
def test_names_that_no_file_has(reader: str, name: str, tmp_path: Path) -> None:
    read, error = READERS[reader]
    with pytest.raises(error):
        read(tmp_path / name)


@pytest.mark.parametrize("reader", [".env", "model types"])
def test_settings_never_wait_for_a_pipe(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "given.toml"
    os.mkfifo(path)
    read, error = READERS[reader]
    with pytest.raises(error, match="pipe"):
        read(path)


def test_a_policy_may_come_through_a_pipe_that_somebody_writes(tmp_path: Path) -> None:
    """As a shell's own substitution gives it; one that says nothing of sense is told as a file is."""
    reading, writing = os.pipe()
    os.write(writing, b"name = 1\n")
    os.close(writing)
    try:
        with pytest.raises(PolicyError, match="name"):
            load_policy(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
