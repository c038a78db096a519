"""What identifies the weights of a layer in a checkpoint, without reading all of them.

Trusted is that a file with the same inode, size and times (modification and status, in nanoseconds) has
the same contents if a sample of its bytes is the same. No tool sets a status time: it tells a file
that was changed in place, or put in another's place, whatever its modification time says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping

from sm70_moe.checkpoint.headers import Headers, TensorEntry
from sm70_moe.errors import CheckpointError
from sm70_moe.regular import regular

SAMPLES = 64
"""Tensors of a layer whose bytes are sampled, spread evenly over all in the order of their names. For file
systems that make inodes and times up: another model's scales and words differ nearly everywhere."""
SAMPLE_BYTES = 4096


def layer_digest(headers: Headers, layer: str, tails: Mapping[str, TensorEntry], declared: str) -> str:
    """SHA-256 over a layer's tensors (name, dtype, shape, file, place, samples) and its files (inode, size, times).

    `declared` is what else decides how the tensors are read. The folder's name does not count. Raises
    CheckpointError for a file that is gone, is no regular one or is another one than its header was read from.
    """
    digest = hashlib.sha256(f"{layer}\n{declared}\n".encode())
    lines = sorted(
        f"{tail} {entry.dtype} {entry.shape} {entry.file} {headers.place(entry)[1]}\n" for tail, entry in tails.items()
    )
    digest.update("".join(lines).encode())
    sampled = [tails[tail] for tail in sorted(tails)]
    sampled = sampled[:: max(1, len(sampled) // SAMPLES)]
    for file in sorted({entry.file for entry in tails.values()}):
        path = headers.folder / file
        with regular(path) as opened:
            headers.check(file, opened.fileno())
            digest.update(f"{file} {headers.stamps[file][1:]}\n".encode())
            for first, size in _places(headers, file, sampled):
                content = os.pread(opened.fileno(), size, first)
                if len(content) != size:
                    raise CheckpointError(f"{path}: changed since its header was read: it ends before {first + size}")
                digest.update(content)
    return digest.hexdigest()


def _places(headers: Headers, file: str, sampled: list[TensorEntry]) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of the middle of each of these tensors that the file holds."""
    for entry in sampled:
        if entry.file == file:
            whole = entry.end - entry.start
            size = min(whole, SAMPLE_BYTES)
            yield headers.place(entry)[1] + (whole - size) // 2, size
