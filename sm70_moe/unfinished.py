"""Folders that are made beside their place and moved there whole: held meanwhile, and swept once their maker is gone.

A process that is killed removes nothing. What it has left is known by its name and by nobody holding it, and goes when
the same thing is made again.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

PARTIAL = ".partial"


@contextmanager
def folder(parent: Path, name: str) -> Iterator[Path]:
    """A new hidden folder in `parent` in which what will be called `name` is made; gone at the end, whatever happens.

    Whoever makes something moves it out. Raises OSError where nothing can be made.
    """
    sweep(parent, name)
    made, held = _held(parent, name)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def sweep(parent: Path, name: str) -> None:
    """Remove what makers of `name` that were killed have left in `parent`; of those that live it is held."""
    own = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}{re.escape(PARTIAL)}")
    with suppress(OSError):
        for found in filter(own.fullmatch, os.listdir(parent)):
            with suppress(OSError):
                held = os.open(parent / found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(parent / found, ignore_errors=True)
                finally:
                    os.close(held)


def _held(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        made = parent / f".{name}.{uuid4().hex}{PARTIAL}"
        made.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # a sweep came between: it took the folder for one that was left
            held = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(held, fcntl.LOCK_EX)
            if os.path.isdir(made):
                return made, held
            os.close(held)
