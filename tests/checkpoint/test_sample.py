"""Sample checkpoints: whole or not there, readable by others, the same for the same seed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from sm70_moe.checkpoint import sample as module
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.errors import SettingsError
from sm70_moe.numbers.decoding import unpack_part
from sm70_moe.numbers.formats import AWQ

SIZES: dict[str, Any] = {
    "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2, "layers": 2, "group": 32, "seed": 1
}  # fmt: skip


def load(folder: Path) -> dict[str, Any]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_sample_is_a_complete_checkpoint(tmp_path: Path) -> None:
    """Config, tensors and router of every layer, in the form that AutoAWQ writes."""
    write_sample(tmp_path / "a", **SIZES)
    checkpoint = Checkpoint.open(tmp_path / "a")
    assert [layer.index for layer in checkpoint.layers] == [0, 1]
    for layer in checkpoint.layers:
        checkpoint.check(layer)
        assert layer.notes == ()
    facts = checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")
    assert (facts.hidden, facts.intermediate, facts.experts, facts.top_k, facts.checkpoint_group) == (
        256,
        128,
        4,
        2,
        32,
    )
    assert load(tmp_path / "a")["model.layers.1.mlp.gate.weight"].shape == (4, 256)


def test_values_do_not_depend_on_the_files(tmp_path: Path) -> None:
    """The same seed gives the same tensors in one file and in many; another seed gives others."""
    write_sample(tmp_path / "one", **SIZES)
    write_sample(tmp_path / "many", **SIZES, shard_bytes=50_000)
    write_sample(tmp_path / "other", **{**SIZES, "seed": 2})
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 4
    one, many, other = (load(tmp_path / name) for name in ("one", "many", "other"))
    assert one.keys() == many.keys() == other.keys()
    assert all(np.array_equal(one[name], many[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)


def test_every_kind_of_value_occurs(tmp_path: Path) -> None:
    """Zeros 0 to 15, negative words, negative and subnormal scales, all finite."""
    write_sample(tmp_path / "a", **SIZES)
    tensors = load(tmp_path / "a")
    scales = np.concatenate([value.ravel() for name, value in tensors.items() if name.endswith("scales")])
    zeros = [
        unpack_part(AWQ.zeros, torch.from_numpy(value)) for name, value in tensors.items() if name.endswith("qzeros")
    ]
    assert np.isfinite(scales).all()
    assert 0.03 < (scales < 0).mean() < 0.07
    assert (np.abs(scales) < 2.0**-14).any()
    assert (scales != 0).all()
    assert torch.cat([zero.flatten() for zero in zeros]).unique().tolist() == list(range(16))
    assert any((value < 0).any() for name, value in tensors.items() if name.endswith("qweight"))


def test_headers_alone_are_the_same_headers(tmp_path: Path) -> None:
    """Without data the files have the same names, lengths and headers, over zeros."""
    write_sample(tmp_path / "full", **SIZES, shard_bytes=100_000)
    write_sample(tmp_path / "sparse", **SIZES, shard_bytes=100_000, data=False)
    full, sparse = (sorted((tmp_path / name).iterdir()) for name in ("full", "sparse"))
    assert [(path.name, path.stat().st_size) for path in full] == [(path.name, path.stat().st_size) for path in sparse]
    assert Checkpoint.open(tmp_path / "sparse").layers == Checkpoint.open(tmp_path / "full").layers


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    """Bytes written grow up to the total."""
    seen: list[tuple[int, int]] = []
    write_sample(tmp_path / "a", **SIZES, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for value in load(tmp_path / "a").values())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    """It is refused by name; an empty one is filled."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("used", "file"):
        with pytest.raises(SettingsError, match=name):
            write_sample(tmp_path / name, **SIZES)
    (tmp_path / "empty").mkdir()
    write_sample(tmp_path / "empty", **SIZES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "used"]


def test_a_writer_that_stops_leaves_nothing(tmp_path: Path) -> None:
    """Neither the folder nor the partial one remains."""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_sample(tmp_path / "a", **SIZES, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": 100}, "hidden is 100"),
        ({"intermediate": 48}, "intermediate is 48"),
        ({"experts": 0}, "experts is 0"),
        ({"layers": -1}, "layers is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sizes_that_make_no_layer_are_refused(tmp_path: Path, changes: dict[str, int], named: str) -> None:
    """With name and value, before anything is written."""
    with pytest.raises(SettingsError, match=named):
        write_sample(tmp_path / "a", **{**SIZES, **changes})
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_by_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are made one at a time: the one before is gone when the next is written."""
    alive: list[weakref.ref[Any]] = []
    values = module.Tensor.values

    def watched(tensor: module.Tensor, seed: int) -> Any:
        assert not any(reference() is not None for reference in alive)
        made = values(tensor, seed)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(module.Tensor, "values", watched)
    write_sample(tmp_path / "a", **{**SIZES, "layers": 1})
    assert len(alive) == 1 + 4 * 9
