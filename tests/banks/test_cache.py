"""Files of prepared banks: what comes back is what was written, or nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.banks.cache import BankCache, Key
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.reading.loading import prepare

SHAPE = BankShape(5, 64, 32)
SOURCE = SyntheticLayer(5, 64, 32, 32)
LAYOUTS = [
    BankLayout(order, metadata, 32, interleaved, batched)
    for order in ("tile32x8", "octet32")
    for metadata in Metadata
    for interleaved, batched in ((True, True), (False, False))
]
LAYOUT = LAYOUTS[2]


def key(layout: BankLayout = LAYOUT) -> Key:
    return Key("model.layers.3.mlp.experts", (4, 1, 1, 0), "first 5f0c", layout, SHAPE, "aa", "1.0")


def tensors(banks: Banks) -> list[torch.Tensor]:
    return [*banks.w13.tensors, *banks.w2.tensors]


def same(one: Banks, other: Banks) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return one.layout == other.layout and all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.fixture(scope="module")
def banks() -> Banks:
    return prepare(SOURCE, LAYOUT, SHAPE, "cpu")


@pytest.fixture(scope="module")
def written(banks: Banks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole file."""
    return BankCache(tmp_path_factory.mktemp("cache")).store(key(), banks)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.tag)
def test_what_is_read_is_what_was_written(layout: BankLayout, tmp_path: Path) -> None:
    """Every order, metadata, interleaved or not, in one tensor or one for each expert."""
    made, cache = prepare(SOURCE, layout, SHAPE, "cpu"), BankCache(tmp_path / "new")
    path = cache.store(key(layout), made)
    found = cache.load(key(layout), "cpu")
    assert (found.file, found.ignored) == (path, "")
    assert found.banks is not None
    assert found.banks.complete
    assert same(found.banks, made)
    assert [item.name for item in path.parent.iterdir()] == [key(layout).file]


def test_others_can_read_the_file(written: Path, banks: Banks) -> None:
    """It is a safetensors file: planes by name, experts first, data at a multiple of 256 bytes, identity in text."""
    with safe_open(written, "pt") as file:
        assert set(file.keys()) == {"w13.words", "w13.metadata", "w2.words", "w2.metadata"}
        assert torch.equal(file.get_tensor("w2.words"), banks.w2.planes["words"])
        told = file.metadata()
    assert {name: told[name] for name in ("layer", "tensor parallel", "policy", "layout", "source", "sm70_moe")} == {
        "layer": "model.layers.3.mlp.experts",
        "tensor parallel": "rank 1 of 4",
        "policy": "first 5f0c",
        "layout": LAYOUT.tag,
        "source": "aa",
        "sm70_moe": "1.0",
    }
    assert len(told["crc32 w13.words"].split()) == 5
    assert (8 + int.from_bytes(written.read_bytes()[:8], "little")) % 256 == 0


def test_names_of_files() -> None:
    """Layer, ranks and layout; characters that no file system likes are replaced, and the name stays unique."""
    assert key().file == (
        "model.layers.3.mlp.experts.tp1of4.ep0of1.tile32x8-3-byte-group-32-interleaved-batched.safetensors"
    )
    odd, other = (replace(key(), layer=f"a{sign}b" * 60).file for sign in "/:")
    assert "/" not in odd
    assert odd != other
    assert len(odd) < 210


def test_a_file_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    """Nothing found, nothing ignored; also where the folder is missing."""
    for folder in (tmp_path, tmp_path / "none"):
        found = BankCache(folder).load(key(), "cpu")
        assert (found.banks, found.ignored) == (None, "")


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (replace(key(), source="bb"), "source is 'aa'"),
        (replace(key(), policy="first 6a"), "policy is 'first 5f0c'"),
        (replace(key(), version="1.1"), "sm70_moe is '1.0'"),
        (replace(key(), shape=BankShape(6, 64, 32)), "shape is '5 experts"),
    ],
)
def test_stale_files_are_ignored(written: Path, wanted: Key, named: str) -> None:
    """Other weights, another policy, package or shape under the same name: told, and not used."""
    assert wanted.file == key().file
    found = BankCache(written.parent).load(wanted, "cpu")
    assert found.banks is None
    assert named in found.ignored


def test_a_file_under_a_wrong_name_is_foreign(written: Path, tmp_path: Path) -> None:
    """A renamed file of another rank or layout is not taken for this one."""
    for wanted, named in (
        (replace(key(), ranks=(4, 2, 1, 0)), "tensor parallel is 'rank 1 of 4'"),
        (replace(key(), ranks=(4, 1, 2, 0)), "expert parallel is"),
        (replace(key(), layer="model.layers.4.mlp.experts"), "layer is"),
        (replace(key(), layout=LAYOUTS[0]), "layout is"),
    ):
        shutil.copy(written, tmp_path / wanted.file)
        found = BankCache(tmp_path).load(wanted, "cpu")
        assert found.banks is None
        assert named in found.ignored


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x08"),
        lambda path: path.write_bytes(b"\xff" * 64),
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}"),
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    ],
)
def test_what_is_no_file_of_banks_is_ignored(written: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Empty, foreign, too long, a folder, a pipe, a device: each with a reason, none an exception or a wait."""
    path = tmp_path / key().file
    shutil.copy(written, path)
    spoil(path)
    found = BankCache(tmp_path).load(key(), "cpu")
    assert found.banks is None
    assert found.ignored


@settings(max_examples=150)
@given(st.data())
def test_one_flipped_bit_is_never_believed(written: Path, banks: Banks, data: st.DataObject) -> None:
    """Anywhere in the file: either it is refused, or the banks are right (a hex digit in the other case)."""
    content = bytearray(written.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.integers(0, start - 1) | st.integers(start, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path = written.parent / "flipped"
    path.mkdir(exist_ok=True)
    (path / key().file).write_bytes(content)
    found = BankCache(path).load(key(), "cpu")
    assert found.ignored if found.banks is None else same(found.banks, banks)
    if place >= start:
        assert "checksum" in found.ignored


@settings(max_examples=60)
@given(st.data())
def test_a_cut_file_is_never_believed(written: Path, data: st.DataObject) -> None:
    """Of any length below the whole one."""
    content = written.read_bytes()
    path = written.parent / "cut"
    path.mkdir(exist_ok=True)
    (path / key().file).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert BankCache(path).load(key(), "cpu").ignored


def test_a_damaged_part_is_named(written: Path, tmp_path: Path) -> None:
    """The last byte of the file is in expert 4 of W2's metadata."""
    content = bytearray(written.read_bytes())
    content[-1] ^= 1
    (tmp_path / key().file).write_bytes(content)
    assert "w2.metadata of expert 4" in BankCache(tmp_path).load(key(), "cpu").ignored


def test_writing_is_all_or_nothing(banks: Banks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while writing leaves the older file as it was, and nothing else."""
    cache = BankCache(tmp_path)
    before = cache.store(key(), banks).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sm70_moe.banks.file.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        cache.store(key(), banks)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_unfilled_banks_are_not_written(tmp_path: Path) -> None:
    """Banks whose weights never arrived are no banks."""
    with pytest.raises(Exception, match="experts 0, 1, 2, 3, 4 of 5"):
        BankCache(tmp_path).store(key(), allocate(LAYOUT, SHAPE, "cpu"))
    assert list(tmp_path.iterdir()) == []


def test_sweeping_removes_what_nobody_writes(tmp_path: Path) -> None:
    """An unfinished file goes, unless its writer still holds it; finished ones stay, and what is somebody else's."""
    left, held, pipe = (f".{name}.safetensors.{name * 32}.partial" for name in "abc")
    others = [".download.partial", f".x.{'A' * 32}.partial", "whole.safetensors"]
    for name in (left, held, *others):
        (tmp_path / name).write_bytes(b"x")
    os.mkfifo(tmp_path / pipe)  # never waited for
    with (tmp_path / held).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        BankCache(tmp_path).sweep()
        assert sorted(os.listdir(tmp_path)) == sorted([held, pipe, *others])
    BankCache(tmp_path).sweep()
    assert sorted(os.listdir(tmp_path)) == sorted([pipe, *others])


def test_a_sweep_between_making_and_locking_costs_nothing(
    banks: Banks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was taken for one that was left is made again."""
    lock, swept = fcntl.flock, []

    def after_a_sweep(file: object, kind: int) -> None:
        if kind == fcntl.LOCK_EX and not swept:
            swept.append(True)
            BankCache(tmp_path).sweep()
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", after_a_sweep)
    stored = BankCache(tmp_path).store(key(), banks)
    assert swept
    assert [path.name for path in tmp_path.iterdir()] == [stored.name]
    assert BankCache(tmp_path).load(key(), "cpu").banks is not None


def test_progress_counts_experts(written: Path) -> None:
    """After every expert that was read, up to all of them."""
    seen: list[tuple[int, int]] = []
    BankCache(written.parent).load(key(), "cpu", lambda done, total: seen.append((done, total)))
    assert seen == [(n, 5) for n in range(1, 6)]


@pytest.mark.parametrize("text", [b"[" * 2000 + b"]" * 2000, b'{"__metadata__":' * 2000, b'{"a": 1e999}', b"null"])
def test_headers_that_are_none(written: Path, tmp_path: Path, text: bytes) -> None:
    """Nested deeply, infinite, nothing: the file is ignored with one reason."""
    path = tmp_path / written.name
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 1000)
    found = BankCache(tmp_path).load(key(), "cpu")
    assert found.banks is None
    assert "header" in found.ignored


def test_a_header_that_is_longer_than_these_banks_can_have(written: Path, tmp_path: Path) -> None:
    """Its length is compared before a byte of it is read: 99 MB of JSON would be gigabytes of objects."""
    path = tmp_path / written.name
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 99_000_000))
        file.truncate(200_000_000)
    tracemalloc.start()
    found = BankCache(tmp_path).load(key(), "cpu")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert "no whole header" in found.ignored
