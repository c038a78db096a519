"""A rank's share, from files and from an engine's tensors, against slices of the whole matrix."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sm70_moe.banks.banks import Banks
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.grouping import Grouping, group_layer
from sm70_moe.layout import BankLayout, Metadata
from sm70_moe.reading.loading import prepare
from sm70_moe.reading.source import CheckpointSource, TensorSource

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def source_of(folder: Path, layer: int = 0, **ranks: int) -> CheckpointSource:
    checkpoint = Checkpoint.open(folder)
    found = checkpoint.layer(layer)
    parallel: dict[str, Any] = {"tensor_parallel": 1, "tensor_rank": 0, **ranks}
    return CheckpointSource(checkpoint, found, checkpoint.facts(found, device="cpu", **parallel))


def banks_of(source: CheckpointSource | TensorSource, shape: Any, group: int = 32) -> Banks:
    return prepare(source, BankLayout("tile32x8", Metadata.FOUR_BYTE, group, False, True), shape, "cpu")


def whole_matrix(tensors: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """A matrix dequantised in numpy from the file's words, with no code of the package."""

    def nibbles(words: torch.Tensor) -> Any:
        unsigned = words.numpy().view(np.uint32)
        return np.stack([(unsigned >> (4 * n)) & 15 for n in ORDER], axis=-1).reshape(len(unsigned), -1)

    codes, zeros = (nibbles(tensors[f"{name}.{kind}"]).astype(np.float64) for kind in ("qweight", "qzeros"))
    scales = tensors[f"{name}.scales"].numpy().astype(np.float64)
    biases = (-zeros * scales).astype(np.float16).astype(np.float64)
    group = len(codes) // len(scales)
    return (codes * np.repeat(scales, group, 0) + np.repeat(biases, group, 0)).astype(np.float16).T


def same(found: torch.Tensor, expected: Any) -> bool:
    return np.array_equal(found.numpy().view(np.uint16), np.ascontiguousarray(expected).view(np.uint16))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_the_real_file_on_every_rank(tiny: Path, layer: int, ranks: int, rank: int) -> None:
    """Every expert's banks equal slices of the matrices that AutoAWQ wrote, bit for bit."""
    tensors = load_file(tiny / "model.safetensors")
    source = source_of(tiny, layer, tensor_parallel=ranks, tensor_rank=rank)
    banks = banks_of(source, source.share.shape)
    width = 128 // ranks
    mine = slice(rank * width, (rank + 1) * width)
    for expert in range(16):
        name = f"model.layers.{layer}.mlp.experts.{expert}"
        w13 = banks.w13.dequantise(expert)
        assert same(w13[:width], whole_matrix(tensors, f"{name}.gate_proj")[mine])
        assert same(w13[width:], whole_matrix(tensors, f"{name}.up_proj")[mine])
        assert same(banks.w2.dequantise(expert), whole_matrix(tensors, f"{name}.down_proj")[:, mine])


@pytest.mark.parametrize(
    ("hidden", "intermediate", "group", "ranks", "prepared"),
    [
        (256, 640, 128, 4, 32),  # the first contract's cut: 160 rows per rank across groups of 128
        (128, 768, 128, 8, 32),
        (128, 384, 64, 2, 64),
        (192, 288, 96, 3, 96),
        (128, 256, 128, 1, 32),  # whole groups, finer metadata
    ],
)
def test_regrouped_shards_are_slices_of_the_whole(
    tmp_path: Path, hidden: int, intermediate: int, group: int, ranks: int, prepared: int
) -> None:
    """On every rank, with scales repeated by the rank's row offset."""
    folder = tmp_path / "sample"
    write_sample(
        folder, hidden=hidden, intermediate=intermediate, experts=2, top_k=1, layers=1, group=group, seed=3
    )  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    width = intermediate // ranks
    for rank in range(ranks):
        source = source_of(folder, tensor_parallel=ranks, tensor_rank=rank)
        banks = banks_of(source, source.share.shape, prepared)
        mine = slice(rank * width, (rank + 1) * width)
        for expert in range(2):
            name = f"model.layers.0.mlp.experts.{expert}"
            w13 = banks.w13.dequantise(expert)
            assert same(w13[:width], whole_matrix(tensors, f"{name}.gate_proj")[mine])
            assert same(w13[width:], whole_matrix(tensors, f"{name}.up_proj")[mine])
            assert same(banks.w2.dequantise(expert), whole_matrix(tensors, f"{name}.down_proj")[:, mine])


def test_the_widest_group_of_a_layer_can_be_read(tmp_path: Path) -> None:
    """What the grouping verdict promises, the source delivers; the next wider one it refuses."""
    folder = tmp_path / "sample"
    write_sample(folder, hidden=256, intermediate=640, experts=1, top_k=1, layers=1, group=128, seed=3)
    source = source_of(folder, tensor_parallel=4, tensor_rank=3)
    checkpoint = Checkpoint.open(folder)
    facts = checkpoint.facts(checkpoint.layers[0], tensor_parallel=4, tensor_rank=3, device="cpu")
    verdict = group_layer(facts)
    assert isinstance(verdict, Grouping)
    assert (verdict.widest, verdict.regrouped) == (32, True)
    assert source.read(0, 32).down.scales.shape == (5, 256)
    with pytest.raises(BackendError, match="64"):
        source.read(0, 64)


def test_one_group_per_column(alter: Callable[..., Path]) -> None:
    """Group -1 is a single group of all rows, for each matrix its own."""

    def one_group(arrays: dict[str, Any]) -> None:
        for name in arrays:
            if name.endswith(("qzeros", "scales")):
                arrays[name] = np.ascontiguousarray(arrays[name][:1])

    folder = alter(one_group, quantization={"group_size": -1})
    tensors = load_file(folder / "model.safetensors")
    for rank in range(3):
        source = source_of(folder, tensor_parallel=3, tensor_rank=rank)
        banks = banks_of(source, source.share.shape, 32)
        mine = slice(rank * 32, (rank + 1) * 32)
        expected = whole_matrix(tensors, "model.layers.0.mlp.experts.1.down_proj")[:, mine]
        assert same(banks.w2.dequantise(1), expected)


def test_expert_parallel_ranks_read_their_own_experts(tiny: Path) -> None:
    """Expert 0 of rank 2 of 3 is expert 11 of 16."""
    source = source_of(tiny, expert_parallel=3, expert_rank=2)
    assert source.experts == 5
    assert torch.equal(source.read(0, 32).gate.codes, source_of(tiny).read(11, 32).gate.codes)


def test_symmetric_files_with_and_without_zeros(alter: Callable[..., Path]) -> None:
    """Zeros that are stored are used, zeros that are not stand for 8."""
    folder = alter(quantization={"zero_point": False})
    assert source_of(folder).read(0, 32).up.zeros.unique().numel() == 16

    def drop(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if name.endswith("qzeros")]:
            del arrays[name]

    assert source_of(alter(drop)).read(0, 32).up.zeros.unique().tolist() == [8]


def test_reading_from_many_threads(tiny: Path) -> None:
    """Any order, any thread: the same codes."""
    source = source_of(tiny, tensor_parallel=2, tensor_rank=1)
    alone = [source.read(expert, 32) for expert in range(16)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda expert: source.read(expert % 16, 32), range(128)))
    for number, found in enumerate(together):
        for matrix in ("gate", "up", "down"):
            left, right = getattr(found, matrix), getattr(alone[number % 16], matrix)
            assert torch.equal(left.codes, right.codes)
            assert torch.equal(left.scales, right.scales)


def test_a_file_that_shrank_after_opening_is_an_error(good: Path) -> None:
    """Its name is told; nothing is read from beyond its end."""
    source = source_of(good)
    (good / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        source.read(2, 32)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(good: Path) -> None:
    """It came after the headers were read, and nobody writes to it."""
    source = source_of(good)
    (good / "model.safetensors").unlink()
    os.mkfifo(good / "model.safetensors")
    source.fetch(0)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        source.read(0, 32)


def test_a_layer_that_cannot_be_read_is_refused_at_once(alter: Callable[..., Path]) -> None:
    """Before the first expert, by what `check` says."""
    with pytest.raises(CheckpointError, match="bits 8"):
        source_of(alter(quantization={"bits": 8}))


def test_facts_of_another_layer_are_refused(tiny: Path, good: Path) -> None:
    """A rank cut for other sizes would read other columns."""
    checkpoint = Checkpoint.open(tiny)
    layer = checkpoint.layer(0)
    facts = checkpoint.facts(layer, tensor_parallel=1, tensor_rank=0, device="cpu")
    with pytest.raises(BackendError, match="another layer"):
        CheckpointSource(checkpoint, layer, replace(facts, intermediate=64))


def test_columns_that_cut_a_word_are_refused(tmp_path: Path) -> None:
    """Twelve columns per rank are one word and a half."""
    write_sample(tmp_path / "a", hidden=24, intermediate=24, experts=1, top_k=1, layers=1, group=12, seed=0)
    with pytest.raises(BackendError, match="12 to 24"):
        source_of(tmp_path / "a", tensor_parallel=2, tensor_rank=1)


def engine_tensors(folder: Path, rank: int, width: int) -> dict[str, torch.Tensor]:
    """What an engine holds for one rank: experts stacked, gate before up, cut for the rank."""
    tensors = load_file(folder / "model.safetensors")
    experts = sorted({int(name.split(".")[5]) for name in tensors if ".experts." in name})
    stacks: dict[str, list[torch.Tensor]] = {}
    for expert in experts:
        name = f"model.layers.0.mlp.experts.{expert}"
        for kind, unit in (("qweight", 8), ("qzeros", 8), ("scales", 1)):
            columns = slice(rank * width // unit, (rank + 1) * width // unit)
            halves = [tensors[f"{name}.{matrix}_proj.{kind}"][:, columns] for matrix in ("gate", "up")]
            stacks.setdefault(f"w13_{kind}", []).append(torch.cat(halves, dim=1))
        for kind, unit in (("qweight", 1), ("qzeros", 32), ("scales", 32)):
            rows = slice(rank * width // unit, (rank + 1) * width // unit)
            stacks.setdefault(f"w2_{kind}", []).append(tensors[f"{name}.down_proj.{kind}"][rows])
    return {name: torch.stack(parts) for name, parts in stacks.items()}


@pytest.mark.parametrize("stacked", [True, False])
def test_an_engines_tensors_read_like_the_files(tiny: Path, stacked: bool) -> None:
    """The same codes, zeros and scales from words that were cut and stacked elsewhere."""
    held: dict[str, Any] = engine_tensors(tiny, rank=1, width=64)
    if not stacked:
        held = {name: list(tensor) for name, tensor in held.items()}
    ours = TensorSource(**held, group=32)
    files = source_of(tiny, tensor_parallel=2, tensor_rank=1)
    assert ours.experts == 16
    for expert in range(16):
        left, right = ours.read(expert, 32), files.read(expert, 32)
        for matrix in ("gate", "up", "down"):
            for field in ("codes", "zeros", "scales"):
                assert torch.equal(getattr(getattr(left, matrix), field), getattr(getattr(right, matrix), field))


def test_an_engines_offset_into_a_group() -> None:
    """A rank that begins 32 rows into a group of 128 takes 96 rows of it and then the next."""
    scales = torch.tensor([[1.0], [2.0]], dtype=torch.float16)
    source = TensorSource(
        w13_qweight=torch.zeros(1, 128, 40, dtype=torch.int32),
        w13_qzeros=None,
        w13_scales=torch.ones(1, 1, 320, dtype=torch.float16),
        w2_qweight=torch.zeros(1, 160, 16, dtype=torch.int32),
        w2_qzeros=None,
        w2_scales=scales.expand(2, 128).unsqueeze(0),
        group=128,
        w2_offset=32,
    )
    down = source.read(0, 32).down
    assert down.scales[:, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert down.zeros.unique().tolist() == [8]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("w13_qweight", (16, 256, 15)),
        ("w13_qzeros", (16, 7, 16)),
        ("w13_scales", (16, 7, 128)),
        ("w2_qweight", (16, 64, 31)),
        ("w2_qzeros", (16, 1, 32)),
        ("w2_scales", (16, 1, 256)),
    ],
)
def test_an_engines_tensor_of_another_shape_is_named(tiny: Path, name: str, shape: tuple[int, ...]) -> None:
    """Hosts do not check this; rows that are missing are told, not filled up."""
    held = engine_tensors(tiny, rank=0, width=64)
    held[name] = torch.zeros(shape, dtype=held[name].dtype)
    with pytest.raises(CheckpointError, match=name):
        TensorSource(**held, group=32).read(0, 32)
