"""Whose a folder of kernels is: what lies in it runs as code in the engine's process."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from sm70_moe.errors import BackendError

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_own(folder: Path, files: Iterable[str]) -> None:
    """BackendError for a folder, or a file in it, that somebody else owns (root aside) or may write.

    What is not there is the reader's matter.
    """
    for path in (folder, *(folder / name for name in files)):
        try:
            state = os.stat(path)
        except (OSError, ValueError):
            continue
        if state.st_uid not in (0, os.geteuid()):
            raise BackendError(
                f"{path}: belongs to user {state.st_uid}; kernels are code, accepted are files of this user or of root"
            )
        if state.st_mode & OTHERS:
            raise BackendError(
                f"{path}: others may write it (mode {stat.S_IMODE(state.st_mode):04o}); kernels are code, accepted are "
                "files that only their owner may write: chmod go-w"
            )


def close_to_others(folder: Path) -> None:
    """Take the right to write a new folder from all but its owner, whatever the umask."""
    for path in (folder, *folder.iterdir()):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)
