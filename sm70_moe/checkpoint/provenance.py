"""What identifies the weights of a layer in a checkpoint, without reading them.

Trusted is that a file whose size and modification time stayed the same has the same contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sm70_moe.checkpoint.headers import Headers, TensorEntry
from sm70_moe.errors import CheckpointError


def layer_digest(headers: Headers, layer: str, tails: Mapping[str, TensorEntry], declared: str) -> str:
    """SHA-256 over a layer's tensors (name, dtype, shape, file, place) and its files (size, time).

    `declared` is what else decides how the tensors are read. The folder's name does not count. Raises
    CheckpointError for a file that is gone.
    """
    digest = hashlib.sha256(f"{layer}\n{declared}\n".encode())
    lines = sorted(
        f"{tail} {entry.dtype} {entry.shape} {entry.file} {headers.place(entry)[1]}\n" for tail, entry in tails.items()
    )
    digest.update("".join(lines).encode())
    for file in sorted({entry.file for entry in tails.values()}):
        try:
            found = (headers.folder / file).stat()
        except OSError as error:
            raise CheckpointError(f"{headers.folder / file}: gone since its header was read: {error}") from error
        digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()
