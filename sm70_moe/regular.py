"""Opening a checkpoint's files; what `opening` refuses is a CheckpointError that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sm70_moe import opening
from sm70_moe.errors import CheckpointError
from sm70_moe.files import text_of

LARGEST_TEXT = 100_000_000
"""Bytes of an index; the largest known has 40,000,000."""


@contextmanager
def regular(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading.

    Raises CheckpointError naming it if it cannot be opened or read, and for a folder, a pipe or a
    device; links are followed.
    """
    try:
        with opening.opened(path) as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def read_text(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """All of a JSON file; raises CheckpointError for what `regular` refuses, more bytes and a byte order mark."""
    try:
        content = opening.content(path, most)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        text_of(content[:4])
    except UnicodeDecodeError:  # half a character, or no text at all: the reader's matter
        return content
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return content


def is_there(path: Path, *, followed: bool) -> bool:
    """Whether the folder has a file of this name, of whatever kind. `followed`: a link to nothing is none.

    Raises CheckpointError if that cannot be told.
    """
    try:
        return opening.is_there(path, followed=followed)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read: {opening.reason(error)}")
