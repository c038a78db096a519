"""Cutting and re-grouping commute, for every format, any geometry and any rank; experts over ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.evidence.oracle import matrix, reference_of
from sm70_moe.grouping import Grouping, alternatives, group_layer
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.rows import ExpertRows
from sm70_moe.reading.source import CheckpointSource

Array = np.ndarray[Any, Any]


def part_of(numbers: Any, rows: slice, columns: slice, group: int) -> tuple[Array, Array, Array]:
    """A part of whole numbers, each row's scale and zero looked up by the row's own number."""
    first = np.arange(len(numbers.codes))[rows][::group] // numbers.group
    return numbers.codes[rows, columns], numbers.zeros[first][:, columns], numbers.scales[first][:, columns]


# the fixtures hold functions and names only: nothing carries over from one example to the next
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    units=st.integers(1, 6),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    group=st.sampled_from([32, 64, 96, 128, -1]),
    wide=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_cutting_and_regrouping_commute(
    form: str, made: Callable[..., Any], units: int, ranks: int, group: int, wide: int, seed: int
) -> None:
    """Reading a rank's part in finer groups gives the numbers that looking up every single row gives."""
    rows = 32 * units  # of a rank
    hidden = (group if group > 0 else 32) * wide
    intermediate = rows * ranks
    if group > 0:  # the smallest size with these ranks that the groups divide
        intermediate *= group // gcd(intermediate, group)
    with tempfile.TemporaryDirectory() as place:
        layer = made(form, hidden=hidden, intermediate=intermediate, experts=1, group=group, seed=seed)
        checkpoint = Checkpoint.open(layer.write(Path(place)))
        found = checkpoint.layers[0]
        for rank in {0, ranks // 2, ranks - 1}:
            facts = checkpoint.facts(found, tensor_parallel=ranks, tensor_rank=rank, device="cpu")
            verdict = group_layer(facts)
            assert isinstance(verdict, Grouping)
            codes = CheckpointSource(checkpoint, found, facts).read(0, verdict.widest)
            width = intermediate // ranks
            mine, every = slice(rank * width, (rank + 1) * width), slice(None)
            for name, cut in (("gate", (every, mine)), ("up", (every, mine)), ("down", (mine, every))):
                read = getattr(codes, name)
                for ours, expected in zip(
                    (read.codes, read.zeros, read.scales),
                    part_of(layer.numbers[f"0.{name}"], *cut, verdict.widest),
                    strict=True,
                ):
                    assert np.array_equal(ours.numpy(), expected)


@pytest.mark.parametrize("rank", [0, 2])
def test_row_words_are_the_packed_codes(
    form: str, rank: int, tmp_path: Path, made: Callable[..., Any], source: Callable[..., CheckpointSource]
) -> None:
    """The short way from stored words to row words gives what packing the codes gives, in every format."""
    found = source(made(form, intermediate=192, seed=7).write(tmp_path), tensor_parallel=3, tensor_rank=rank)
    for expert in range(2):
        short, long = found.read_rows(expert, 32), ExpertRows.of(found.read(expert, 32))
        for part in ("gate", "up", "down"):
            for field in ("words", "zeros", "scales"):
                assert torch.equal(getattr(getattr(short, part), field), getattr(getattr(long, part), field))


@pytest.mark.parametrize("group", [32, 96, -1])
def test_the_oracle_reads_every_format_by_itself(
    form: str, group: int, tmp_path: Path, made: Callable[..., Any]
) -> None:
    """Its whole matrices are the weights of the numbers that were packed, with none of the decoder's code."""
    layer = made(form, hidden=96, intermediate=192, group=group, seed=1)
    checkpoint = Checkpoint.open(layer.write(tmp_path))
    for name in layer.numbers:
        expert, part = name.split(".")
        found = matrix(checkpoint, checkpoint.layers[0], int(expert), part).weights(slice(None), slice(None))
        assert np.array_equal(found, layer.weights(name).astype(np.float64))


def test_expert_parallel_ranks_hold_their_own(
    form: str, tmp_path: Path, made: Callable[..., Any], source: Callable[..., CheckpointSource]
) -> None:
    """Five experts on two ranks: 0 to 2 and 3, 4; the map sends another rank's ids to -1."""
    layer = made(form, experts=5, seed=2)
    folder = layer.write(tmp_path)
    ranks = [source(folder, expert_parallel=2, expert_rank=rank) for rank in range(2)]
    assert [one.experts for one in ranks] == [3, 2]
    assert [one.share.local_ids(5) for one in ranks] == [(0, 1, 2, -1, -1), (-1, -1, -1, 0, 1)]
    for one in ranks:
        for expert in one.share.experts:
            codes = one.read(one.share.local_id(expert), 32).down.codes
            assert np.array_equal(codes.numpy(), layer.numbers[f"{expert}.down"].codes)


def test_ids_that_are_none_map_to_minus_one(
    tmp_path: Path, made: Callable[..., Any], source: Callable[..., CheckpointSource]
) -> None:
    """Below zero, or as many as there are experts and more."""
    share = source(made("awq", experts=4).write(tmp_path), expert_parallel=2, expert_rank=1).share
    assert [share.local_id(expert) for expert in (-1, 0, 2, 3, 4, 10**6)] == [-1, -1, 0, 1, -1, -1]


def test_expert_parallel_ranks_add_up(tmp_path: Path, made: Callable[..., Any]) -> None:
    """With the map, two ranks' answers add up to the whole layer's: foreign slots contribute zero."""
    checkpoint = Checkpoint.open(made("gptq-v1", experts=4, seed=3).write(tmp_path))
    layer = checkpoint.layers[0]
    x = np.random.default_rng(0).standard_normal((3, 128))
    ids = np.array([[0, 3], [2, 1], [3, 3]])
    weights = np.array([[0.5, 0.5], [0.25, 0.75], [1.0, 0.5]])

    def slots(ranks: int, rank: int) -> Array:
        facts = checkpoint.facts(
            layer, tensor_parallel=1, tensor_rank=0, expert_parallel=ranks, expert_rank=rank, device="cpu"
        )
        table = np.array(CheckpointSource(checkpoint, layer, facts).share.local_ids(4))
        answer = reference_of(checkpoint, layer, facts).answer(x, table[ids], weights, "float16")
        return answer.products * weights[..., None]

    assert np.array_equal(slots(1, 0), slots(2, 0) + slots(2, 1))


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [
        ((2560, 640, 128), "1, 2, 4,"),
        ((2048, 1408, 128), "1, 2, 4,"),
        ((2560, 640, 32), "1, 2, 4,"),
        ((2048, 768, 128), "1, 2, 4, 8,"),
    ],
)
def test_what_would_fit_is_offered(sizes: tuple[int, int, int], fit: str) -> None:
    """The tensor-parallel sizes that work, and expert parallelism."""
    assert f"tensor parallel {fit}" in alternatives(*sizes)
    assert "expert parallel" in alternatives(*sizes)


def test_nothing_is_offered_for_groups_that_are_too_fine() -> None:
    """Groups of 16 stay groups of 16, however the layer is cut."""
    assert "expert parallel" not in alternatives(2048, 768, 16)


def test_strided_words_decode_as_they_stand(tmp_path: Path, made: Callable[..., Any]) -> None:
    """A part of a matrix need not be contiguous."""
    from sm70_moe.numbers.decoding import decode
    from sm70_moe.numbers.formats import AWQ

    layer = made("awq", hidden=64, intermediate=64, group=32)
    kinds = ("qweight", "qzeros", "scales")
    tensors = {kind: layer.tensors[f"model.layers.0.mlp.experts.0.up_proj.{kind}"] for kind in kinds}
    wide = {kind: torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]] for kind, tensor in tensors.items()}
    ours, theirs = decode(AWQ, wide, (0, 1)), decode(AWQ, tensors, (0, 1))
    assert isinstance(ours, Codes)
    assert torch.equal(ours.codes, theirs.codes)
