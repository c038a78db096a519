"""The one way to open a file that somebody has given: a regular one, of bounded size, and never waited for.

Checkpoints, prepared banks, policies, `.env` files and tables of model types are opened here. What cannot be opened or
read is an OSError whose `strerror` says why, whatever the cause, so that each reader has one thing to catch and names
the file in its own words.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EFBIG, EINVAL, ETIMEDOUT
from pathlib import Path
from typing import BinaryIO

SILENCE = 10.0
"""Seconds that a pipe named on a command line may stay silent."""

CHUNK = 2**16

Stamp = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, times of modification and of status in nanoseconds: another one, another content."""


def stamp(state: os.stat_result) -> Stamp:
    return (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@contextmanager
def opened(path: Path, *, linked: bool = True, piped: bool = False) -> Iterator[BinaryIO]:
    """A regular file, opened for reading. `linked`: its name may be a link; `piped`: it may be a pipe.

    Raises OSError for what is none, cannot be opened or cannot be read.
    """
    descriptor = descriptor_of(path, linked=linked, piped=piped)
    with os.fdopen(descriptor, "rb") as file:
        yield file


def descriptor_of(path: Path, *, linked: bool = True, piped: bool = False) -> int:
    """`opened` for who closes it himself."""
    # a pipe that nobody writes to would block without O_NONBLOCK, which regular files ignore
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if linked else os.O_NOFOLLOW)
    try:
        if not linked and os.path.islink(path):
            raise OSError(EINVAL, "a link leads to it; accepted is a regular file", str(path))
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL in the name
        raise OSError(EINVAL, str(error), str(path)) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not (piped and stat.S_ISFIFO(mode)):
            kind = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise OSError(EINVAL, f"is a {kind}; accepted is a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def content(path: Path, most: int, *, linked: bool = True, piped: bool = False) -> bytes:
    """All of a file, of at most `most` bytes; raises what `opened` raises, and OSError for a longer one."""
    with opened(path, linked=linked, piped=piped) as file:
        state = os.fstat(file.fileno())
        if stat.S_ISFIFO(state.st_mode):
            found = _of_pipe(path, file.fileno(), most)
        else:
            if state.st_size > most:
                raise _too_long(path, f"{state.st_size}", most)
            found = file.read(state.st_size + 1)  # a read makes room for all that it is asked for
            if len(found) > state.st_size:  # it grows, and files of the kernel's have no size
                found += file.read(most + 1 - len(found))
    if len(found) > most:
        raise _too_long(path, f"more than {most}", most)
    return found


def reason(error: OSError | ValueError) -> str:
    """Why a file was not read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def is_there(path: Path, *, followed: bool) -> bool:
    """Whether there is a file of this name, of whatever kind. `followed`: a link to nothing is none.

    Raises OSError if that cannot be told.
    """
    try:
        os.stat(path, follow_symlinks=followed)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError as error:
        raise OSError(EINVAL, str(error), str(path)) from error
    return True


def _of_pipe(path: Path, descriptor: int, most: int) -> bytes:
    """What a pipe's writers say until the last one closes it; one byte more than accepted at most."""
    parts: list[bytes] = []
    size, last = 0, time.monotonic()
    while size <= most:
        left = last + SILENCE - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise OSError(ETIMEDOUT, f"is a pipe to which nobody wrote for {SILENCE:g} seconds", str(path))
        try:
            part = os.read(descriptor, min(CHUNK, most + 1 - size))
        except BlockingIOError:
            continue
        if not part:
            break
        parts.append(part)
        size, last = size + len(part), time.monotonic()
    return b"".join(parts)


def _too_long(path: Path, size: str, most: int) -> OSError:
    return OSError(EFBIG, f"{size} bytes; at most {most} are accepted", str(path))
