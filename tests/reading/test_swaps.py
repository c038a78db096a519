"""A file that changes between its header and its bytes: noticed at every moment, never loaded."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.headers import INDEX, read_headers
from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import fake_machine, settings

FILE = "model.safetensors"
CHANGED = "changed since its header was read"


def other(folder: Path) -> Path:
    """A file of the same header and size, with other data."""
    whole = (folder / FILE).read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    path = folder / "other"
    path.write_bytes(whole[:start] + whole[start:][::-1])
    return path


def by_rename(folder: Path) -> None:
    os.replace(other(folder), folder / FILE)


def by_rename_with_its_times(folder: Path) -> None:
    found, path = (folder / FILE).stat(), other(folder)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    os.replace(path, folder / FILE)


def in_place(folder: Path) -> None:
    shutil.copyfile(other(folder), folder / FILE)


def in_place_with_its_times(folder: Path) -> None:
    found = (folder / FILE).stat()
    in_place(folder)
    os.utime(folder / FILE, ns=(found.st_atime_ns, found.st_mtime_ns))


SWAPS = [by_rename, by_rename_with_its_times, in_place, in_place_with_its_times]


class Told(CheckpointSource):
    """A source that has the facts it was made with."""

    facts: LayerFacts


def source_of(folder: Path) -> Told:
    checkpoint = Checkpoint.open(folder)
    layer = checkpoint.layers[0]
    facts = checkpoint.facts(layer, tensor_parallel=1, tensor_rank=0, device="cuda:0")
    made = Told(checkpoint, layer, facts)
    made.facts = facts
    return made


@pytest.mark.parametrize("swap", SWAPS)
def test_no_bytes_of_another_file_are_read(good: Path, swap: Callable[[Path], None]) -> None:
    source = source_of(good)
    source.check()
    swap(good)
    for reading in (lambda: source.read(0, 32), lambda: source.read_batch(range(2), 32), source.check):
        with pytest.raises(CheckpointError, match=CHANGED):
            reading()
    with pytest.raises(CheckpointError, match=CHANGED):
        _ = source.digest
    source.fetch(0)  # raises nothing
    source_of(good).check()  # opened again


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("swap", SWAPS)
def test_what_changes_after_the_last_byte_is_neither_kept_nor_run(
    good: Path, tmp_path: Path, swap: Callable[[Path], None], cached: bool
) -> None:
    """`cached`: the banks are found in the folder, by a key that was the older file's."""
    variables = {"SM70_MOE_CACHE": str(tmp_path / "cache"), "SM70_MOE_PROOF": "0"}
    service = AdmissionService(settings(**variables), machine=fake_machine())
    if cached:
        first = source_of(good)
        service.layer(first.facts, first, device="cpu")
    source = source_of(good)

    def late(done: int, total: int) -> None:
        if done == total:
            swap(good)

    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*")}
    with pytest.raises(CheckpointError, match=CHANGED):
        service.layer(source.facts, source, device="cpu", progress=late)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*")} == kept


def test_two_names_of_one_file_are_no_two_shards(sharded: Path) -> None:
    names = sorted(path.name for path in sharded.glob("model-*"))
    (sharded / names[1]).unlink()
    os.link(sharded / names[0], sharded / names[1])
    with pytest.raises(CheckpointError, match="same file") as caught:
        read_headers(sharded)
    assert names[0] in str(caught.value)
    assert (sharded / INDEX).exists()
