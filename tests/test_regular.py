"""Opening a checkpoint's files: what cannot be read, and what only looks like a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.headers import INDEX, read_headers
from sm70_moe.errors import CheckpointError
from sm70_moe.regular import LARGEST_TEXT, read_text

SHARD = "model-00001-of-00002.safetensors"
FILES = ["config.json", INDEX, SHARD]


@pytest.fixture
def pair(sharded: Path) -> Path:
    """A folder of two or more shards whose first is called `SHARD`."""
    first = next(sharded.glob("model-00001-*"))
    index = sharded / INDEX
    index.write_text(index.read_text().replace(first.name, SHARD))
    first.rename(sharded / SHARD)
    return sharded


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_named_and_not_waited_for(pair: Path, name: str, kind: Callable[[Path], Any]) -> None:
    """A folder or a pipe in the place of each file; nobody writes to the pipe."""
    (pair / name).unlink()
    kind(pair / name)
    told = refusal(pair)
    assert str(pair / name) in told
    assert "regular file" in told


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_named(pair: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's reason; a user with all rights could not be refused by a mode."""
    opening = os.open

    def refusing(path: Any, *rest: Any, **named: Any) -> int:
        if str(path) == str(pair / name):
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    told = refusal(pair)
    assert str(pair / name) in told
    assert "Permission denied" in told


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_itself_is_named(pair: Path, name: str) -> None:
    """The system refuses to follow it."""
    (pair / name).unlink()
    (pair / name).symlink_to(name)
    assert str(pair / name) in refusal(pair)


def test_links_are_followed(pair: Path, tmp_path: Path) -> None:
    """Download caches keep the files elsewhere and link to them."""
    for name in FILES:
        (pair / name).rename(tmp_path / f"blob-{name}")
        (pair / name).symlink_to(tmp_path / f"blob-{name}")
    assert len(Checkpoint.open(pair).layers) == 1


def test_an_index_that_links_to_nothing_is_not_passed_over(pair: Path) -> None:
    """The folder has an index, and it cannot be read."""
    (pair / INDEX).unlink()
    (pair / INDEX).symlink_to("nothing")
    with pytest.raises(CheckpointError, match=INDEX):
        read_headers(pair)


def test_an_absurdly_long_text_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no memory."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=str(LARGEST_TEXT)):
        read_text(tmp_path / "config.json")
