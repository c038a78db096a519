"""What a folder of safetensors files says it holds, read from the headers alone.

A large mixture-of-experts checkpoint has more than 200,000 tensors, so the usual case runs in
loops that the interpreter executes in C; only a broken file is looked at tensor by tensor.
"""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from operator import sub
from pathlib import Path
from typing import Annotated

import msgspec

from sm70_moe.checkpoint.folder import what_is_there
from sm70_moe.errors import CheckpointError
from sm70_moe.opening import Stamp, stamp
from sm70_moe.regular import is_there, read_text, regular, unreadable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer headers too."""

LARGEST_HEADERS = 250_000_000
"""Bytes of all headers of a folder together; the largest known checkpoints have 40,000,000."""

LONGEST_NAME = 255
"""Bytes of a file's name, as in every file system that matters."""

MOST_DIMENSIONS = 64
"""Of a tensor; torch and numpy end there too."""

BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one element, by the name that safetensors gives a dtype."""

Natural = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(msgspec.Struct, gc=False):
    """One tensor: its file, safetensors dtype ("F16", "I32"), shape and place.

    `start` and `end` are bytes from the beginning of the file's data, after the header. Treat it
    as read-only; it is not frozen because freezing costs a third of the loading time.
    """

    dtype: str = ""
    shape: tuple[Natural, ...] = ()
    offsets: tuple[Natural, Natural] = msgspec.field(name="data_offsets", default=(0, 0))
    file: str = ""

    @property
    def start(self) -> int:
        return self.offsets[0]

    @property
    def end(self) -> int:
        return self.offsets[1]


class _Index(msgspec.Struct, gc=False):
    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(dict[str, TensorEntry])
_ENTRY = msgspec.json.Decoder(TensorEntry)
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INDEX = msgspec.json.Decoder(_Index)


@dataclass(frozen=True, slots=True)
class Headers:
    """All tensors of a folder, by file and name.

    `data` gives, for each file, where its data begins, in bytes; `stamps` which file its header was read
    from. One map of all names would cost a tenth of the loading time, and nothing needs it.
    """

    folder: Path
    shards: dict[str, dict[str, TensorEntry]]
    data: dict[str, int]
    stamps: dict[str, Stamp]

    def __len__(self) -> int:
        return sum(map(len, self.shards.values()))

    def find(self, name: str) -> TensorEntry | None:
        """The entry of this name, in whichever file; None if there is none."""
        return next((entries[name] for entries in self.shards.values() if name in entries), None)

    def place(self, entry: TensorEntry) -> tuple[Path, int]:
        """The file of a tensor, and the byte in it at which the tensor starts."""
        return self.folder / entry.file, self.data[entry.file] + entry.start

    def check(self, file: str, descriptor: int) -> None:
        """Raise CheckpointError unless what was opened under this name is what the header was read from."""
        self._same(file, stamp(os.fstat(descriptor)))

    def check_all(self, files: Iterable[str]) -> None:
        """The same of the files as their names lead to them now: before what was read of them is trusted."""
        for file in files:
            try:
                found = stamp(os.stat(self.folder / file))
            except OSError as error:
                raise unreadable(self.folder / file, error) from error
            self._same(file, found)

    def _same(self, file: str, found: Stamp) -> None:
        if found != self.stamps[file]:
            raise CheckpointError(
                f"{self.folder / file}: changed since its header was read: another file, size or time; open the "
                "checkpoint again"
            )


def read_headers(folder: str | os.PathLike[str]) -> Headers:
    """Read every header of a Hugging Face folder, and check them against files and index.

    Raises CheckpointError naming file and tensor for: no safetensors file, a missing shard, one
    that cannot be read or is no regular file, a name that leads out of the folder, a truncated
    file, a header that is too long or no JSON, a dtype that is not known, offsets that
    overlap, leave a hole or do not fit dtype and shape, a tensor in two shards, and an index that
    names a tensor its shard does not hold.
    """
    root = Path(folder)
    with collector_paused():
        weight_map = _read_index(root)
        files = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        read: dict[str, _Shard] = {}
        for file in files:
            read[file] = _read_shard(root / file, LARGEST_HEADERS - sum(shard.data for shard in read.values()))
            _check_own(root, file, read)
        shards = {file: shard.entries for file, shard in read.items()}
        if weight_map is not None:
            _check_index(weight_map, shards)
    data = {file: shard.data for file, shard in read.items()}
    return Headers(root, shards, data, {file: shard.stamp for file, shard in read.items()})


@contextmanager
def collector_paused() -> Iterator[None]:
    """Decoding makes a million objects and no cycle: collecting meanwhile triples the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_index(root: Path) -> dict[str, str] | None:
    """The index's map from tensor to file; None if the folder has a single file instead."""
    path = root / INDEX
    if not is_there(path, followed=False):
        if not is_there(root / SINGLE, followed=False):
            raise CheckpointError(f"{root}: holds neither {INDEX} nor {SINGLE}{what_is_there(root, SINGLE)}")
        return None
    try:
        weight_map = _INDEX.decode(read_text(path)).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a safetensors index: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: not a safetensors index: nested too deeply") from error
    for file in set(weight_map.values()):
        _check_name(path, file)
        if not is_there(root / file, followed=True):
            raise CheckpointError(f"{root}: shard {file} is missing; {INDEX} names it")
    return weight_map


def entries_of(path: Path) -> dict[str, TensorEntry]:
    """The checked entries of a file that is in no index; raises what `read_headers` raises."""
    with collector_paused():
        return _read_shard(path, LARGEST_HEADERS).entries


def _check_name(index: Path, file: str) -> None:
    """A shard lies beside its index; its name must not lead anywhere else."""
    if file in ("", ".", "..") or not file.isprintable() or {"/", "\\"} & set(file):
        raise CheckpointError(f"{index}: file name {file[:80]!r}; accepted is a printable name without a folder")
    if len(file.encode()) > LONGEST_NAME:
        raise CheckpointError(f"{index}: file name {file[:80]!r}...; accepted are at most {LONGEST_NAME} bytes")


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file: its checked entries, where its data begins, and which file that was."""

    entries: dict[str, TensorEntry]
    data: int
    stamp: Stamp


def _check_own(root: Path, file: str, read: dict[str, _Shard]) -> None:
    """Two names of one file: all of its tensors would be in two shards."""
    for other, shard in read.items():
        if other != file and shard.stamp[:2] == read[file].stamp[:2]:
            raise CheckpointError(f"{root / file}: is the same file as {other}; accepted is a file for each shard")


def _read_shard(path: Path, room: int) -> _Shard:
    """Read one file, whose header may have `room` bytes."""
    with regular(path) as file:
        found = stamp(os.fstat(file.fileno()))
        size = found[2]
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: truncated, {size} bytes do not hold a header")
        (length,) = struct.unpack("<Q", prefix)
        if length > LARGEST_HEADER:
            raise CheckpointError(f"{path}: header of {length} bytes; at most {LARGEST_HEADER} are accepted")
        if length > room:
            raise CheckpointError(f"{path}: with its header, all have more than the {LARGEST_HEADERS} accepted bytes")
        if 8 + length > size:
            raise CheckpointError(f"{path}: truncated, header of {length} bytes in a file of {size} bytes")
        entries = _decode(path, file.read(length))
    entries.pop("__metadata__", None)
    _check_shard(path, entries, size - 8 - length)
    name = path.name
    for entry in entries.values():
        entry.file = name
    return _Shard(entries, 8 + length, found)


def _decode(path: Path, header: bytes) -> dict[str, TensorEntry]:
    """Decode a header; if that fails, entry by entry, to find the one to name."""
    try:
        return _HEADER.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # told below, with the tensor's name
    try:
        raw = _RAW.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: header is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: header is nested too deeply; accepted is a table of tensors") from error
    raw.pop("__metadata__", None)
    entries: dict[str, TensorEntry] = {}
    for name, text in raw.items():
        try:
            entries[name] = _ENTRY.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: tensor {name}: {error}") from error
    return entries


class _Sizes(dict[tuple[str, tuple[int, ...]], int | None]):
    """Bytes by (dtype, shape), computed once for each pair; None if they are no whole number."""

    def __missing__(self, key: tuple[str, tuple[int, ...]]) -> int | None:
        dtype, shape = key
        self[key] = None
        if dtype in BITS and len(shape) <= MOST_DIMENSIONS:
            whole, rest = divmod(BITS[dtype] * prod(shape), 8)
            self[key] = None if rest else whole
        return self[key]


def _check_shard(path: Path, entries: dict[str, TensorEntry], available: int) -> None:
    """Check that the tensors fill the file's data exactly, in the order they are named or any other."""
    known = _Sizes()
    sizes = [known[entry.dtype, entry.shape] for entry in entries.values()]
    starts = [entry.offsets[0] for entry in entries.values()]
    ends = [entry.offsets[1] for entry in entries.values()]
    chained = starts == [0, *ends[:-1]][: len(starts)] and [*map(sub, ends, starts)] == sizes
    end = ends[-1] if chained and ends else _check_entries(path, entries)
    if end > available:
        raise CheckpointError(f"{path}: truncated, its tensors take {end} bytes and {available} are there")
    if end < available:
        raise CheckpointError(f"{path}: {available - end} bytes after the last tensor belong to none")


def _check_entries(path: Path, entries: dict[str, TensorEntry]) -> int:
    """Walk the tensors by offset and raise for the first bad one; else the end of the last."""
    known = _Sizes()
    position = 0
    before = "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offsets):
        if entry.dtype not in BITS:
            raise CheckpointError(f"{path}: tensor {name}: dtype {entry.dtype!r}; accepted are {', '.join(BITS)}")
        if len(entry.shape) > MOST_DIMENSIONS:
            raise CheckpointError(
                f"{path}: tensor {name}: {len(entry.shape)} dimensions; accepted are at most {MOST_DIMENSIONS}"
            )
        size = known[entry.dtype, entry.shape]
        if entry.end - entry.start != size:
            raise CheckpointError(
                f"{path}: tensor {name}: {entry.dtype} {list(entry.shape)} takes {size} bytes, "
                f"offsets {list(entry.offsets)} hold {entry.end - entry.start}"
            )
        if entry.start != position:
            fault = "overlaps" if entry.start < position else "leaves a hole after"
            raise CheckpointError(f"{path}: tensor {name}: offset {entry.start} {fault} {before}, end {position}")
        position, before = entry.end, name
    return position


def _check_index(weight_map: dict[str, str], shards: dict[str, dict[str, TensorEntry]]) -> None:
    """Check that the index and the shards place every tensor of the index alike."""
    alike = all([*map(weight_map.get, entries)] == [file] * len(entries) for file, entries in shards.items())
    if alike and len(weight_map) == sum(map(len, shards.values())):
        return
    owner: dict[str, str] = {}
    for file, entries in shards.items():
        for name in entries:
            if name in owner:
                raise CheckpointError(f"tensor {name} is in two shards: {owner[name]} and {file}")
            owner[name] = file
    for name, file in weight_map.items():
        found = owner.get(name)
        if found is None:
            raise CheckpointError(f"{INDEX}: tensor {name} is not in {file}, nor in another shard")
        if found != file:
            raise CheckpointError(f"{INDEX}: tensor {name} is said to be in {file}, but is in {found}")
