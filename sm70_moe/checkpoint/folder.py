"""The names of a folder's files: what holds weights, whatever it is called."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from sm70_moe.errors import CheckpointError

SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Ends of files that hold weights as Python pickles."""
SHOWN = 3


def left_out(root: Path, shards: Collection[str]) -> list[str]:
    """Safetensors files of a folder that are none of these: what an index leaves out, or stands beside it."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX) and entry.name not in shards)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error.strerror}") from error


def what_is_there(root: Path, single: str) -> str:
    """What a folder without an index and the file `single` has instead, for the message; "" for nothing."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return ""
    files = [name for name in names if name.endswith(SUFFIX)]
    pickles = [name for name in names if name.endswith(PICKLES)]
    told = f"; it holds {_listed(files)}, which no index names: accepted is {single}, or an index" if files else ""
    return told + (
        f"; it holds {_listed(pickles)}, weights in pickle files: accepted is safetensors" if pickles else ""
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name)[1:-1] for name in names[:SHOWN]) + more
