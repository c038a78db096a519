"""What identifies a layer's weights: another file, changed in place or put in its place, is another one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sm70_moe import AdmissionService, Settings
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.headers import SINGLE
from sm70_moe.checkpoint.provenance import layer_digest
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.errors import CheckpointError
from sm70_moe.reading.source import CheckpointSource


def written(folder: Path, seed: int = 1) -> Path:
    write_sample(folder, hidden=64, intermediate=64, experts=2, top_k=2, layers=1, group=32, seed=seed)
    return folder


def digest_of(folder: Path) -> str:
    checkpoint = Checkpoint.open(folder)
    layer = checkpoint.layers[0]
    return layer_digest(checkpoint.headers, layer.name, layer.tails, repr(layer.quantization))


def edit(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))


def swap(file: Path) -> None:
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    os.replace(copy, file)


def other(file: Path) -> None:
    shutil.copyfile(written(file.parent / "other", seed=2) / SINGLE, file)


@pytest.mark.parametrize("change", [edit, swap, other], ids=["in-place", "replaced-by-a-copy", "another-model"])
def test_a_changed_file_is_another_one_whatever_its_times_say(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Size and modification time are put back each time."""
    folder = written(tmp_path / "model")
    before, stated = digest_of(folder), (folder / SINGLE).stat()
    assert digest_of(folder) == before
    change(folder / SINGLE)
    os.utime(folder / SINGLE, ns=(stated.st_atime_ns, stated.st_mtime_ns))
    assert (folder / SINGLE).stat().st_size == stated.st_size
    assert digest_of(folder) != before


def test_the_folder_s_name_does_not_count(tmp_path: Path) -> None:
    """A model under another mount point is the same."""
    folder = written(tmp_path / "model")
    before = digest_of(folder)
    assert digest_of(folder.rename(tmp_path / "elsewhere")) == before


def test_samples_tell_where_a_file_system_makes_everything_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models with the same inode, size and times: their bytes differ."""
    one, two = (written(tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2)))
    stated = (one / SINGLE).stat()
    monkeypatch.setattr(os, "fstat", lambda _: stated)
    assert digest_of(one) != digest_of(two)


def test_two_models_of_equal_sizes_and_times_do_not_share_banks(tmp_path: Path) -> None:
    """Row 24: the second would have run the first one's weights."""
    banks = []
    for seed in (1, 2):
        folder = written(tmp_path / str(seed), seed)
        os.utime(folder / SINGLE, ns=(0, 0))
        checkpoint = Checkpoint.open(folder)
        facts = checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")
        with AdmissionService(Settings(cache=tmp_path / "cache")) as service:
            layer = service.layer(facts, CheckpointSource(checkpoint, checkpoint.layers[0], facts))
        banks.append(layer.banks.w13.planes["words"][0].clone())
    assert not banks[0].equal(banks[1])


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    """It changed since its header was read."""
    folder = written(tmp_path)
    checkpoint = Checkpoint.open(folder)
    os.truncate(folder / SINGLE, 4096)
    layer = checkpoint.layers[0]
    with pytest.raises(CheckpointError, match="changed since its header was read"):
        layer_digest(checkpoint.headers, layer.name, layer.tails, "")
