"""One file of prepared banks, written whole or not at all, and read only if every byte is right."""

from __future__ import annotations

import fcntl
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import torch

from sm70_moe.banks.banks import Banks, Stack, allocate
from sm70_moe.banks.header import Identity, Section, Sums, Unusable, header, header_length, sections, verify
from sm70_moe.banks.threads import default_readers, each
from sm70_moe.layout import BankLayout, BankShape
from sm70_moe.opening import descriptor_of, opened

PARTIAL = ".partial"
OWN_PARTIAL = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(PARTIAL)}")

Progress = Callable[[int, int], None]
"""Called with the number of experts done and of all experts."""


def write(path: Path, banks: Banks, identity: Identity) -> None:
    """Write complete banks, all or nothing. Raises OSError where the folder cannot be written."""
    banks.require_complete()
    places, stacks, experts = sections(banks), _stacks(banks), banks.shape.experts
    sums: dict[str, list[int]] = {name: [0] * experts for name in places}

    def check(expert: int) -> None:
        for name, stack in stacks.items():
            sums[name][expert] = zlib.crc32(_bytes(stack[expert].cpu()))

    with closing(each(check, range(experts), default_readers())) as done:
        for _ in done:
            pass
    with _replacing(path) as file:
        file.write(header(places, identity, sums, banks.reaches))
        for stack in stacks.values():
            for expert in range(experts):
                file.write(_bytes(stack[expert].cpu()))


def read(
    path: Path,
    identity: Identity,
    layout: BankLayout,
    shape: BankShape,
    device: str | torch.device,
    progress: Progress | None = None,
) -> Banks:
    """The banks of a file, every checksum compared.

    Raises Unusable if it does not hold exactly these banks, FileNotFoundError if it is not there.
    """
    with _opened(path) as file:
        banks = allocate(layout, shape, device)
        stacks, places = _stacks(banks), sections(banks)
        size = os.fstat(file.fileno()).st_size
        length = header_length(file.read(8), size, places)
        sums, reaches = verify(file.read(length), size, places, identity)
        banks.reaches.update(reaches)
        reader = _Reader(file, 8 + length, places, sums)

        def fill(expert: int) -> None:
            for name, stack in stacks.items():
                reader.fill(name, expert, stack[expert])
            banks.filled.add(expert)

        with closing(each(fill, range(shape.experts), default_readers())) as finished:
            for done, _ in enumerate(finished, 1):
                if progress is not None:
                    progress(done, shape.experts)
    return banks


def sweep(folder: Path) -> None:
    """Remove files that a writer left unfinished. Those of a writer that still lives are locked, and stay.

    Only files of a writer's own names are looked at; whoever else hides a `.partial` here keeps it.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return  # whoever writes there is told
    for name in filter(OWN_PARTIAL.fullmatch, names):
        path = folder / name
        try:
            with opened(path, linked=False) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:
            continue  # it is being written, or somebody else removed it


class _Reader:
    """Reads parts of an open file whose data begins at byte `start`."""

    def __init__(self, file: BinaryIO, start: int, places: dict[str, Section], sums: Sums) -> None:
        self.file, self.start, self.places, self.sums = file, start, places, sums

    def fill(self, name: str, expert: int, part: torch.Tensor) -> None:
        """Read one expert's part of a plane into its place; Unusable if it is not what was written."""
        found = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
        into, place = _bytes(found), self.places[name]
        self._read(into, self.start + place.start + expert * place.part, f"{name} of expert {expert}")
        if zlib.crc32(into) != self.sums[name][expert]:
            raise Unusable(f"{name} of expert {expert} has another checksum than was written")
        if found is not part:
            part.copy_(found)

    def _read(self, into: memoryview, start: int, what: str) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self.file.fileno(), [into[done:]], start + done)
            except OSError as error:
                raise Unusable(f"{what} cannot be read: {error.strerror}") from error
            if not count:
                raise Unusable(f"{what} ends early")
            done += count


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place when all is written; locked meanwhile, for `sweep`."""
    while True:
        partial = path.with_name(f".{path.name}.{uuid4().hex}{PARTIAL}")
        file = partial.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # a sweep came between the two: it took the file for one that was left
    try:
        with file:
            yield file
            file.flush()
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        descriptor = descriptor_of(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise Unusable(f"it cannot be opened: {error.strerror}") from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file


def _stacks(banks: Banks) -> dict[str, Stack]:
    """The planes of both banks by their names in the file."""
    pairs = (("w13", banks.w13), ("w2", banks.w2))
    return {f"{matrix}.{name}": stack for matrix, bank in pairs for name, stack in bank.planes.items()}


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(torch.uint8).numpy().data.cast("B")
