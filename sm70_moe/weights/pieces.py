"""The bytes of a checkpoint's tensors: only the rows that a rank needs, copied out of the files.

Files are read and not mapped. Both were measured equally fast while memory was plentiful; when other
processes squeezed the page cache, faults in a mapping read the same bytes up to 40 times.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sm70_moe.errors import CheckpointError
from sm70_moe.weights.decoding import DTYPES
from sm70_moe.weights.headers import Headers, TensorEntry


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns of one tensor; rows count all dimensions but the last together."""

    entry: TensorEntry
    rows: range
    columns: range

    @property
    def itemsize(self) -> int:
        return DTYPES[self.entry.dtype].itemsize

    def place(self, headers: Headers) -> tuple[Path, int, int]:
        """File, first byte and bytes of the whole rows; the columns lie among them."""
        step = self.entry.shape[-1] * self.itemsize
        path, start = headers.place(self.entry)
        return path, start + self.rows.start * step, len(self.rows) * step


@dataclass(slots=True)
class Files:
    """Files of a checkpoint while a few pieces are read; `opened` makes and closes them."""

    headers: Headers
    descriptors: dict[Path, int] = field(default_factory=dict)

    def read(self, piece: Piece, name: str = "") -> torch.Tensor:
        """A copy (rows, columns) of a piece.

        Raises CheckpointError, naming the tensor after `name`, if the file cannot be read or ends
        early: it changed since its header was read.
        """
        path, first, size = piece.place(self.headers)
        part = torch.empty(len(piece.rows), len(piece.columns), dtype=DTYPES[piece.entry.dtype])
        if not part.numel():
            return part
        # as bytes, for numpy has no BF16
        found = part.view(torch.uint8).numpy()
        rows = found if found.nbytes == size else np.empty((len(piece.rows), size // len(piece.rows)), np.uint8)
        try:
            self._fill(path, rows.data.cast("B"), first)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{name}{path}: changed since its header was read: {error}") from error
        if rows is not found:
            np.copyto(found, rows[:, piece.columns.start * piece.itemsize : piece.columns.stop * piece.itemsize])
        return part

    def descriptor(self, path: Path) -> int:
        if path not in self.descriptors:
            self.descriptors[path] = os.open(path, os.O_RDONLY)
        return self.descriptors[path]

    def _fill(self, path: Path, into: memoryview, first: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self.descriptor(path), [into[done:]], first + done)
            if not count:
                raise EOFError(f"it ends at byte {first + done}, the tensor at {first + len(into)}")
            done += count


@contextmanager
def opened(headers: Headers) -> Iterator[Files]:
    """Opens files when they are first read, and closes them at the end."""
    files = Files(headers)
    try:
        yield files
    finally:
        for descriptor in files.descriptors.values():
            os.close(descriptor)


def fetch(headers: Headers, pieces: Iterable[Piece]) -> None:
    """Let the system read these pieces' rows ahead, without waiting for them; a fault is left to `read`."""
    with opened(headers) as files:
        for piece in pieces:
            path, first, size = piece.place(headers)
            try:
                os.posix_fadvise(files.descriptor(path), first, size, os.POSIX_FADV_WILLNEED)
            except OSError:
                return
