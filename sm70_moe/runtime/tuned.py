"""Tactics that were measured on a device, kept in one JSON file; whatever else the file holds is not trusted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from sm70_moe.kernels.build.entries import Unfit, check_owner, default_folder, read

KIND, SCHEMA = "sm70_moe tuned tactics", 1
FILE = "tuned.json"

Warn = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True)
class Key:
    """What a choice holds for: the device's model, the kernels' id, a rank's sizes and banks, and a bucket's most
    tokens."""

    device: str
    images: str
    geometry: str
    bucket: int

    def __str__(self) -> str:
        return json.dumps([self.device, self.images, self.geometry, self.bucket])


@dataclass(slots=True)
class TunedFile:
    """The file, or none (`path` None).

    One that is foreign, broken, from a later version, another user's, or in another process's hands is left as it
    is, and so is one that cannot be written: `warn` hears of it once, and tactics are measured anew.
    """

    path: Path | None
    warn: Warn
    _ignored: bool = field(default=False, init=False)

    def find(self, key: Key, offered: tuple[str, ...]) -> str | None:
        """The tactic that was kept for this key, if it is one of those that are offered now."""
        with self._held() as entries:
            found = entries.get(str(key)) if entries is not None else None
        return found if isinstance(found, str) and found in offered else None

    def keep(self, key: Key, tactic: str) -> None:
        """Written whole or not at all, beside what others have kept meanwhile."""
        with self._held() as entries:
            if entries is not None and self.path is not None:
                record = {"kind": KIND, "schema": SCHEMA, "entries": {**entries, str(key): tactic}}
                content = (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
                try:
                    replace_with(self.path, content)
                except OSError as error:  # a full disk, a folder that may only be read
                    self._ignore(f"cannot be written ({error.strerror or error})")

    @contextmanager
    def _held(self) -> Iterator[Mapping[str, Any] | None]:
        """The entries, in our hands alone; None where the file is not ours to use."""
        if self.path is None or self._ignored:
            yield None
            return
        lock: int | None = None
        try:
            lock = self._lock(self.path)
            yield self._entries(self.path) if lock is not None else None
        finally:
            if lock is not None:
                os.close(lock)  # which unlocks it

    def _lock(self, path: Path) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        lock = None
        try:
            import fcntl  # on POSIX systems

            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            check_owner(os.stat(path.parent), "folder")
            lock = os.open(path.with_name(f"{path.name}.lock"), flags, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._ignore("another process holds it")
        except Unfit as error:
            self._ignore(str(error))
        except (OSError, ImportError) as error:
            self._ignore(f"cannot be locked ({error})")
        else:
            return lock
        if lock is not None:
            with suppress(OSError):
                os.close(lock)
        return None

    def _entries(self, path: Path) -> Mapping[str, Any] | None:
        try:
            record = json.loads(read(path))
        except FileNotFoundError:
            return {}
        except Unfit as error:
            return self._ignore(str(error))
        except (OSError, ValueError, RecursionError) as error:
            return self._ignore(f"not readable as JSON ({type(error).__name__})")
        if not isinstance(record, dict) or record.get("kind") != KIND:
            return self._ignore("not a file of tuned tactics")
        if record.get("schema") != SCHEMA:
            return self._ignore(f"schema {record.get('schema')!r}, expected {SCHEMA}")
        entries = record.get("entries")
        return entries if isinstance(entries, dict) else self._ignore("its entries are no table")

    def _ignore(self, why: str) -> Mapping[str, Any] | None:
        """Nothing, from now on."""
        assert self.path is not None
        self._ignored = True
        self.warn(self.path, f"{why}; tactics are measured anew and not kept")
        return None


def replace_with(path: Path, content: bytes) -> None:
    """Write a file, all or nothing, that nobody else may write, whatever the umask. Raises OSError."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(content)
        os.replace(partial, path)
    finally:  # after the replacement there is nothing
        with suppress(OSError):
            partial.unlink()


def file_in(kernel_cache: Path | bool) -> Path | None:
    """Beside the kernels that are compiled on this machine, under the same setting; None where nothing is kept."""
    folder = default_folder(os.environ) if kernel_cache is True else kernel_cache
    return folder / FILE if folder else None
