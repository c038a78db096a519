"""Reading safetensors headers, and every way in which a folder can be damaged."""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from sm70_moe.checkpoint.headers import INDEX, SINGLE, read_headers
from sm70_moe.errors import CheckpointError


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_one_file_gives_dtype_shape_and_place(tiny: Path) -> None:
    """A tensor of a real file is found with its dtype, shape and bytes."""
    headers = read_headers(tiny)
    found = headers.find("model.layers.1.mlp.experts.15.down_proj.qzeros")
    assert found is not None
    assert (found.file, found.dtype, found.shape) == (SINGLE, "I32", (4, 32))
    assert found.end - found.start == 4 * 32 * 4
    path, start = headers.place(found)
    assert path == tiny / SINGLE
    assert start == headers.data[SINGLE] + found.start


def test_the_librarys_own_reader_sees_the_same(sharded: Path) -> None:
    """Names, dtypes and shapes agree with the safetensors library, over several shards."""
    headers = read_headers(sharded)
    assert len(headers.shards) > 2
    for file, entries in headers.shards.items():
        with safe_open(sharded / file, "numpy") as theirs:
            assert set(theirs.keys()) == set(entries)
            for name, ours in entries.items():
                part = theirs.get_slice(name)
                assert (part.get_dtype(), part.get_shape()) == (ours.dtype, list(ours.shape))


def test_the_collector_is_left_as_it_was(good: Path) -> None:
    """Loading pauses the garbage collector and restores it, also when it was off or loading fails."""
    assert gc.isenabled()
    read_headers(good)
    assert gc.isenabled()
    gc.disable()
    try:
        read_headers(good)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(CheckpointError):
        read_headers(good / "nothing")
    assert gc.isenabled()


def test_an_unknown_name_is_not_found(good: Path) -> None:
    """A name that no file holds gives None."""
    assert read_headers(good).find("nonsense") is None


def test_metadata_may_hold_any_key(tmp_path: Path) -> None:
    """Free-form metadata that looks like a tensor is no tensor and no fault."""
    metadata = {"shape": "round", "dtype": "text", "data_offsets": "none"}
    write_raw(tmp_path / SINGLE, {"__metadata__": metadata, "a": entry("I32", [2], 0, 8)}, b"\0" * 8)
    assert list(read_headers(tmp_path).shards[SINGLE]) == ["a"]


def test_tensors_may_be_named_in_any_order(tmp_path: Path) -> None:
    """The order in a header need not be the order of the data."""
    write_raw(tmp_path / SINGLE, {"b": entry("F16", [2], 4, 8), "a": entry("F32", [1], 0, 4)}, b"\0" * 8)
    assert len(read_headers(tmp_path)) == 2


@pytest.mark.parametrize(
    ("header", "data", "named"),
    [
        ({"a": entry("I32", [4], 0, 16), "b": entry("I32", [1], 16, 20)}, 16, ["truncated", "20", "16"]),
        ({"a": entry("I32", [4], 0, 16)}, 20, ["4 bytes"]),
        ({"a": entry("I32", [4], 0, 12)}, 12, ["tensor a", "16", "12"]),
        ({"a": entry("I33", [4], 0, 16)}, 16, ["tensor a", "'I33'", "I32"]),
        ({"a": entry("I33", [4], 1, 0)}, 0, ["tensor a", "'I33'"]),
        ({"a": entry("I32", [-2, -2], 0, 16)}, 16, ["tensor a"]),
        ({"a": entry("I32", [True], 0, 4)}, 4, ["tensor a"]),
        ({"a": {"dtype": "I32", "shape": [1]}}, 0, ["tensor a"]),
        ({"a": "I32"}, 0, ["tensor a"]),
        ({"a": entry("I32", [2], 0, 8), "b": entry("I32", [2], 4, 12)}, 12, ["tensor b", "overlaps a"]),
        ({"a": entry("I32", [2], 0, 8), "b": entry("I32", [2], 12, 20)}, 20, ["tensor b", "hole after a"]),
        ({"a": entry("I32", [2], 4, 12)}, 12, ["tensor a", "hole after the header"]),
        ({"a": entry("I32", [2**62] * 100, 0, 16)}, 16, ["tensor a", "100 dimensions", "64"]),
        ({"a": entry("I32", [1] * 65, 0, 4)}, 4, ["tensor a", "65 dimensions", "64"]),
        (b'{"a":{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}}", 0, ["nested"]),
        (b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 0, ["nested"]),
        (b"{", 0, ["JSON"]),
        (b"[1]", 0, ["JSON"]),
        (b"\xff\xfe", 0, ["JSON"]),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, header: dict[str, Any] | bytes, data: int, named: list[str]
) -> None:
    """Each kind of damage names the file, the tensor and the numbers."""
    write_raw(tmp_path / SINGLE, header, b"\0" * data)
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    for text in [SINGLE, *named]:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 bytes"),
        (b"\x08\0\0", "3 bytes"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes"),
        (struct.pack("<Q", 2**63), str(2**63)),
    ],
)
def test_a_header_that_is_not_all_there_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    """A file that ends inside its header, or claims an absurd one, is refused without reading it."""
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=named):
        read_headers(tmp_path)


def test_a_truncated_shard_is_refused(sharded: Path) -> None:
    """A download that stopped is told by the file's length."""
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError) as caught:
        read_headers(sharded)
    assert shard.name in str(caught.value)
    assert "truncated" in str(caught.value)


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    """A shard that the index names and the folder lacks is named."""
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        read_headers(sharded)


def change_index(folder: Path, **entries: str | None) -> list[str]:
    """Set or remove entries of the index; returns the names of the shards."""
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"].update(entries)
    (folder / INDEX).write_text(json.dumps(content))
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_an_index_that_names_an_absent_tensor_is_refused(sharded: Path) -> None:
    """The tensor and the shard that should hold it are named."""
    first = sorted(path.name for path in sharded.glob("*.safetensors"))[0]
    change_index(sharded, nonsense=first)
    with pytest.raises(CheckpointError) as caught:
        read_headers(sharded)
    assert "nonsense" in str(caught.value)
    assert first in str(caught.value)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    """Both shards are named: the one of the index and the one that holds the tensor."""
    name = "model.layers.0.mlp.gate.weight"
    first, *_, last = change_index(sharded)
    change_index(sharded, **{name: last})
    with pytest.raises(CheckpointError) as caught:
        read_headers(sharded)
    for text in (name, first, last):
        assert text in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which of the two would count is nobody's guess."""
    for file in ("one.safetensors", "two.safetensors"):
        write_raw(tmp_path / file, {"a": entry("I32", [1], 0, 4), file[:3]: entry("I32", [1], 4, 8)}, b"\0" * 8)
    weight_map = {"a": "one.safetensors", "one": "one.safetensors", "two": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    for text in ("tensor a", "one.safetensors", "two.safetensors"):
        assert text in str(caught.value)


def test_a_tensor_that_the_index_leaves_out_is_still_found(sharded: Path) -> None:
    """Writers that add tensors to a shard later forget the index; the tensors are there."""
    content = json.loads((sharded / INDEX).read_text())
    del content["weight_map"]["model.layers.0.mlp.gate.weight"]
    (sharded / INDEX).write_text(json.dumps(content))
    assert read_headers(sharded).find("model.layers.0.mlp.gate.weight") is not None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": {"a": 1}}'])
def test_an_unreadable_index_is_refused(good: Path, content: bytes) -> None:
    """An index that is no index is named, even beside a single file."""
    (good / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=INDEX):
        read_headers(good)


@pytest.mark.parametrize("file", ["../good/model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_may_not_lead_out_of_the_folder(good: Path, file: str) -> None:
    """A file name with a folder in it is refused."""
    (good / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="without a folder"):
        read_headers(good)


def test_a_folder_without_tensors_says_what_is_accepted(tmp_path: Path) -> None:
    """Both accepted file names are told."""
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    assert SINGLE in str(caught.value)
    assert INDEX in str(caught.value)


def test_nothing_of_the_header_path_imports_torch_or_numpy(tiny: Path) -> None:
    """Explaining a checkpoint works where torch is not installed."""
    program = (
        "import sys; from sm70_moe.checkpoint.checkpoint import Checkpoint; import sm70_moe.reading.shard;"
        f"c = Checkpoint.open({str(tiny)!r}); [c.check(layer) for layer in c.layers];"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "file", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "x\0y", "x\ny", "x" * 256, "ä" * 128]
)
def test_a_shard_stays_in_its_folder(tmp_path: Path, file: str) -> None:
    """Names that lead elsewhere, or that no file system takes, are told with the index."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    for text in (str(tmp_path / INDEX), repr(file[:80])):
        assert text in str(caught.value)


@pytest.mark.parametrize("key", ["metadata", "weight_map"])
def test_an_index_that_is_nested_too_deeply(tmp_path: Path, key: str) -> None:
    """Anywhere in it."""
    (tmp_path / INDEX).write_text(f'{{"{key}":' + "[" * 20_000 + "]" * 20_000 + "}")
    with pytest.raises(CheckpointError, match=INDEX):
        read_headers(tmp_path)


def test_as_many_dimensions_as_are_accepted(tmp_path: Path) -> None:
    """64 are; bytes and offsets fit as in the refused case with one more."""
    write_raw(tmp_path / SINGLE, {"a": entry("I32", [1] * 64, 0, 4)}, bytes(4))
    found = read_headers(tmp_path).find("a")
    assert found is not None
    assert found.shape == (1,) * 64


def test_a_byte_order_mark_in_front_of_an_index_is_named(good: Path) -> None:
    """An editor's mark is said, not an invalid character."""
    (good / INDEX).write_bytes(b"\xef\xbb\xbf" + b'{"weight_map": {}}')
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors\.index\.json: found a byte order mark \(BOM\) of UTF-8"
    ):
        read_headers(good)
