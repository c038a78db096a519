"""Opening files that somebody else has put there: only regular ones, and never waiting for one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sm70_moe.errors import CheckpointError
from sm70_moe.files import text_of

LARGEST_TEXT = 100_000_000
"""Bytes of a JSON file; the largest known index has 40,000,000."""


@contextmanager
def regular(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading.

    Raises CheckpointError naming it if it cannot be opened or read, and for a folder, a pipe or a
    device; links are followed.
    """
    try:
        # a pipe that nobody writes to would block without O_NONBLOCK, which regular files ignore
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
        raise CheckpointError(f"{path}: is a {kind}; accepted is a regular file")
    try:
        with os.fdopen(descriptor, "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def read_text(path: Path) -> bytes:
    """All of a JSON file; raises CheckpointError for what `regular` refuses, an absurd length and a byte order mark."""
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_TEXT:
            raise CheckpointError(f"{path}: {size} bytes; at most {LARGEST_TEXT} are accepted")
        content = file.read()
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
        os.stat(path, follow_symlinks=followed)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return True


def unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    cause = error.strerror if isinstance(error, OSError) else error
    return CheckpointError(f"{path}: cannot be read: {cause}")
