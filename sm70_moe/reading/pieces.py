"""The bytes of a checkpoint's tensors: only the rows that a rank needs, copied out of the files.

Files are read and not mapped. Both were measured equally fast while memory was plentiful; when other
processes squeezed the page cache, faults in a mapping read the same bytes up to 40 times.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sm70_moe.checkpoint.headers import Headers, TensorEntry
from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.decoding import DTYPES
from sm70_moe.opening import descriptor_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns of one tensor; rows count all dimensions but the last together."""

    entry: TensorEntry
    rows: range
    columns: range

    @property
    def form(self) -> tuple[str, int, range, int]:
        """What must be equal for pieces to be read as one tensor."""
        return self.entry.dtype, len(self.rows), self.columns, self.entry.shape[-1]

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
    descriptors: dict[str, int] = field(default_factory=dict)

    def read(self, pieces: Sequence[Piece], names: Sequence[str]) -> torch.Tensor:
        """Pieces of one form (pieces, rows, columns): a view of their whole rows.

        Raises CheckpointError that begins with the piece's name if its file cannot be read or ends
        early: it changed since its header was read.
        """
        form = pieces[0]
        shape = (len(pieces), len(form.rows), form.entry.shape[-1])
        found = torch.empty(shape, dtype=DTYPES[form.entry.dtype])
        # as bytes, for numpy has no BF16
        whole = found.view(torch.uint8).numpy()
        for into, piece, name in zip(whole, pieces, names, strict=True):
            if into.size:
                path, first, _ = piece.place(self.headers)
                try:
                    self._fill(piece.entry.file, into.data.cast("B"), first)
                except CheckpointError as error:
                    raise CheckpointError(f"{name}: {error}") from error
                except (OSError, EOFError) as error:
                    raise CheckpointError(f"{name} in {path}: changed since its header was read: {error}") from error
        return found[..., form.columns.start : form.columns.stop]

    def descriptor(self, file: str) -> int:
        """The open file of this name; CheckpointError for another one than the header was read from."""
        if file not in self.descriptors:
            found = descriptor_of(self.headers.folder / file)
            try:
                self.headers.check(file, found)
            except BaseException:
                os.close(found)
                raise
            self.descriptors[file] = found
        return self.descriptors[file]

    def _fill(self, file: str, into: memoryview, first: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self.descriptor(file), [into[done:]], first + done)
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
    with opened(headers) as files, suppress(OSError, CheckpointError):
        for path, first, end in joined(piece.place(headers) for piece in pieces):
            os.posix_fadvise(files.descriptor(path.name), first, end - first, os.POSIX_FADV_WILLNEED)


def joined(places: Iterable[tuple[Path, int, int]]) -> Iterator[tuple[Path, int, int]]:
    """(file, first byte, end) of places (file, first byte, bytes) in order, neighbours as one."""
    path, start, end = Path(), 0, 0
    for file, first, size in places:
        if (file, first) != (path, end):
            if end > start:
                yield path, start, end
            path, start = file, first
        end = first + size
    if end > start:
        yield path, start, end
