"""Cubins that were compiled on this machine: a folder with a file for each, named by what it was made from.

A file is written whole or not at all, and carries its key and the digest of its bytes. One that is
broken, is no regular file, belongs to another user or may be written by others is not used.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from sm70_moe.kernels.build.images import digest

MAGIC = b"sm70-moe kernel 1\n"
SUFFIX, PARTIAL = ".kernel", ".partial"

HEX = 64
"""Characters of a SHA-256 in hexadecimal."""

MOST = 16 * 2**20
"""Bytes of a file at most; a cubin of ours has a hundredth of it."""

WAIT = 60.0
"""Seconds that a process waits for another one to compile the same; then it compiles itself."""

ABANDONED = 3600.0
"""Seconds after which an unfinished file was left by a writer that is no more."""


@dataclass(frozen=True, slots=True)
class Found:
    """A cubin, or why the file that is there is not used; neither where there is none."""

    content: bytes | None
    ignored: str = ""


class Unfit(Exception):
    """A file or folder that is not used, and why."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The files of one folder, which is made when the first is written."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def has(self, key: str) -> bool:
        """Is there a file of that name? Whether it is any good, `load` says."""
        with suppress(OSError):
            return stat.S_ISREG(os.lstat(self.path(key)).st_mode)
        return False

    def any(self) -> bool:
        """Is any cubin there, whole or not?"""
        try:
            return any(name.suffix == SUFFIX for name in self.folder.iterdir())
        except OSError:
            return False

    def unfit(self) -> str:
        """Why the folder is not used at all; nothing if it is good, or not there yet."""
        try:
            check_owner(os.stat(self.folder), "folder")
        except FileNotFoundError:
            return ""
        except Unfit as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        return ""

    def load(self, key: str) -> Found:
        """The cubin of a key, its digest checked."""
        try:
            return Found(cubin_of(key, read(self.path(key))))
        except FileNotFoundError:
            return Found(None)
        except Unfit as error:
            return Found(None, str(error))
        except OSError as error:
            return Found(None, f"cannot be read: {error.strerror or error}")

    def store(self, key: str, content: bytes) -> None:
        """Write a cubin, all or nothing. Raises OSError where that is not possible."""
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        partial = self.folder / f".{key}.{uuid4().hex}{PARTIAL}"
        try:
            # nobody else may write it, whatever the umask; others may read what an administrator fills
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
                file.write(b"".join((MAGIC, key.encode(), b"\n", digest(content).encode(), b"\n", content)))
            os.replace(partial, self.path(key))
        finally:  # after the replacement there is nothing
            with suppress(OSError):
                partial.unlink()

    def sweep(self) -> None:
        """Remove what writers that were killed have left unfinished."""
        for path in self.folder.glob(f".*{PARTIAL}"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > ABANDONED:
                    path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the processes that compile into the folder; where that cannot be had, at the same time."""
        lock: int | None = None
        with suppress(OSError):
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if lock is not None:
                wait_for(lock)
            yield
        finally:
            if lock is not None:
                os.close(lock)  # which unlocks it, as the end of the process does


def default_folder(environment: Mapping[str, str]) -> Path | None:
    """`sm70-moe/kernels` in the user's cache directory; None for a user without a home."""
    given = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # its specification has relative ones ignored
        return Path(given) / "sm70-moe" / "kernels"
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path(home) / ".cache" / "sm70-moe" / "kernels" if os.path.isabs(home) else None


def read(path: Path) -> bytes:
    """A file's bytes, if it is a regular one of ours. Raises OSError and Unfit."""
    if path.is_symlink():
        raise Unfit("a link leads to it")
    # a pipe that somebody put there must not stop us
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise Unfit("is no regular file")
        check_owner(state, "file")
        content = file.read(MOST + 1)
    if len(content) > MOST:
        raise Unfit(f"is larger than {MOST} bytes")
    return content


def check_owner(state: os.stat_result, what: str) -> None:
    """Only this user and root may be able to change what is loaded into the driver. Raises Unfit."""
    if not hasattr(os, "geteuid"):
        return
    if state.st_uid not in (0, os.geteuid()):
        raise Unfit(f"the {what} belongs to user {state.st_uid}, accepted are {os.geteuid()} and 0")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unfit(f"the {what} may be written by others: mode {stat.S_IMODE(state.st_mode):o}")


def cubin_of(key: str, whole: bytes) -> bytes:
    """A file's cubin. Raises Unfit for another key, and for bytes that are not those that were written."""
    start = len(MAGIC) + 2 * (HEX + 1)
    if not whole.startswith(MAGIC) or len(whole) <= start:
        raise Unfit("is broken or of another kind")
    named, told = whole[len(MAGIC) : start].decode(errors="replace").split("\n")[:2]
    if named != key:
        raise Unfit(f"holds {named[:16]}, expected {key[:16]}")
    if digest(whole[start:]) != told:
        raise Unfit(f"has digest {digest(whole[start:])[:16]}, written was {told[:16]}")
    return whole[start:]


def wait_for(lock: int) -> None:
    """Lock an open file, or give up: a stopped process, or a file system without locks, must not stop us."""
    try:
        import fcntl
    except ImportError:  # no POSIX system
        return
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return
        else:
            return
