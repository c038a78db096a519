"""Tensors that an engine has loaded and cut, in every format, against the files that they came from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.numbers.formats import AWQ, COMPRESSED, GPTQ_V1, GPTQ_V2, Format
from sm70_moe.reading.source import CheckpointSource, TensorSource

HIDDEN, INNER = 256, 128

# kinds of codes, zeros and scales; the dimension of N; codes in a word along K and along N
LAYOUTS = {
    "awq": (("qweight", "qzeros", "scales"), 1, 1, 8),
    "gptq": (("qweight", "qzeros", "scales"), 1, 8, 1),
    "compressed-tensors": (("weight_packed", "weight_zero_point", "weight_scale"), 0, 8, 1),
}


def held(data: Path, folder: str, layer: int, form: Format, group: int, ranks: int, rank: int) -> TensorSource:
    """What an engine holds for one rank: experts stacked, gate before up, cut for the rank."""
    tensors = load_file(data / folder / "model.safetensors")
    kinds, across, along_k, along_n = LAYOUTS[form.name]
    width = INNER // ranks
    start, stop = rank * width, (rank + 1) * width
    rows = INNER if group == -1 else group
    experts = sorted({int(n.split(".")[5]) for n in tensors if f"layers.{layer}.mlp.experts." in n})
    stacks: dict[str, list[torch.Tensor]] = {}
    for expert in experts:
        name = f"model.layers.{layer}.mlp.experts.{expert}"
        for kind, unit, down in zip(kinds, (along_n, 8, 1), (along_k, rows, rows), strict=True):
            if f"{name}.up_proj.{kind}" not in tensors:
                continue
            pair = [tensors[f"{name}.{matrix}_proj.{kind}"] for matrix in ("gate", "up")]
            halves = [one.narrow(across, start // unit, width // unit) for one in pair]
            stacks.setdefault(f"w13_{kind}", []).append(torch.cat(halves, across))
            first, last = start // down, -(-stop // down)
            stacks.setdefault(f"w2_{kind}", []).append(
                tensors[f"{name}.down_proj.{kind}"].narrow(1 - across, first, last - first)
            )
    offset = start if group == -1 else start % group
    return TensorSource.of(form, {n: torch.stack(s) for n, s in stacks.items()}, group=group, w2_offset=offset)


@pytest.mark.parametrize(("ranks", "rank", "prepared"), [(1, 0, 32), (2, 0, 64), (2, 1, 32), (4, 3, 32)])
@pytest.mark.parametrize(
    ("folder", "layer", "form", "group"),
    [
        ("tiny-qwen3-moe-awq", 1, AWQ, 32),
        ("compressed-tensors-asymmetric", 0, COMPRESSED, 32),
        ("compressed-tensors-asymmetric", 1, COMPRESSED, -1),
        ("compressed-tensors-symmetric", 0, COMPRESSED, 128),
        ("gptq-v1-asymmetric", 0, GPTQ_V1, 32),
        ("gptq-v1-asymmetric", 1, GPTQ_V1, 128),
        ("gptq-v2-symmetric", 1, GPTQ_V2, 128),
    ],
)
def test_every_format_reads_like_its_files(
    tiny: Path, folder: str, layer: int, form: Format, group: int, ranks: int, rank: int, prepared: int
) -> None:
    """Codes, zeros, scales and row words are equal bit for bit, also where a rank begins within a group."""
    prepared = min(prepared, group) if group > 0 else prepared
    ours = held(tiny.parent, folder, layer, form, group, ranks, rank)
    checkpoint = Checkpoint.open(tiny.parent / folder)
    of = checkpoint.layer(layer)
    facts = checkpoint.facts(of, tensor_parallel=ranks, tensor_rank=rank, device="cpu")
    files = CheckpointSource(checkpoint, of, facts)
    assert ours.experts == files.experts
    for expert in range(ours.experts):
        codes = [source.read(expert, prepared) for source in (ours, files)]
        rows = [source.read_rows(expert, prepared) for source in (ours, files)]
        for matrix in ("gate", "up", "down"):
            for field in ("codes", "zeros", "scales"):
                left, right = (getattr(getattr(one, matrix), field) for one in codes)
                assert left.dtype is right.dtype
                assert torch.equal(left, right)
            assert torch.equal(getattr(rows[0], matrix).words, getattr(rows[1], matrix).words)


def test_the_two_conventions_of_gptq_differ(tiny: Path) -> None:
    """The same words, read as version 1 and as version 2: zeros one apart, modulo the word."""
    first = held(tiny.parent, "gptq-v2-symmetric", 0, GPTQ_V1, 128, 1, 0).read(0, 128)
    second = held(tiny.parent, "gptq-v2-symmetric", 0, GPTQ_V2, 128, 1, 0).read(0, 128)
    assert first.up.zeros.unique().tolist() == [9]
    assert second.up.zeros.unique().tolist() == [8]


def awq(**changes: Any) -> dict[str, Any]:
    """Arguments of a source of two experts with H 128, I 64 and groups of 32."""

    def words(*shape: int) -> torch.Tensor:
        return torch.zeros(2, *shape, dtype=torch.int32)

    def scales(*shape: int) -> torch.Tensor:
        return torch.ones(2, *shape, dtype=torch.float16)

    return {
        "w13_qweight": words(128, 16),
        "w13_qzeros": words(4, 16),
        "w13_scales": scales(4, 128),
        "w2_qweight": words(64, 16),
        "w2_qzeros": words(2, 16),
        "w2_scales": scales(2, 128),
        "group": 32,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"w2_offset": -32}, ["w2_offset -32", "0 to 31"]),
        ({"w2_offset": 32}, ["w2_offset 32", "0 to 31"]),
        ({"w2_offset": 10**9}, ["w2_offset 1000000000"]),
        ({"w2_offset": -1, "group": -1}, ["w2_offset -1"]),
        ({"group": 0}, ["group 0"]),
        ({"group": -2}, ["group -2"]),
        ({"w2_qweight": [torch.zeros(64, 16, dtype=torch.int32)]}, ["w2_qweight: 1 experts", "2"]),
        ({"w13_qzeros": []}, ["w13_qzeros: 0 experts", "2"]),
    ],
)
def test_numbers_that_no_rank_has_are_refused(changes: dict[str, Any], named: list[str]) -> None:
    """At once, with the name, the value and what is accepted; none of them reads other rows."""
    with pytest.raises(BackendError) as caught:
        TensorSource(**awq(**changes))
    for text in (*named, "accepted"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expert", "prepared", "error", "named"),
    [
        ({}, 2, 32, BackendError, "expert 2; accepted are 0 to 1"),
        ({}, -1, 32, BackendError, "expert -1; accepted are 0 to 1"),
        ({}, 0, 0, BackendError, "groups of 0 rows"),
        ({"w2_offset": 16}, 0, 32, CheckpointError, "w2_qzeros"),  # 16 to 80 touch three groups, not two
        ({"group": 96}, 0, 32, BackendError, "96"),
        ({"group": 2**40}, 0, 32, BackendError, str(2**40)),
        ({"w13_scales": torch.ones(2, 4, 128)}, 0, 32, CheckpointError, "w13_scales"),
        ({"w2_scales": torch.ones(2, 2, 128).double()}, 0, 32, CheckpointError, "w2_scales"),
        ({"w13_qweight": torch.zeros(2, 0, 16, dtype=torch.int32)}, 0, 32, CheckpointError, "w13_qweight"),
        ({"w2_qweight": torch.zeros(2, 64, dtype=torch.int32)}, 0, 32, CheckpointError, "w2_qweight"),
        ({"w2_qweight": torch.zeros(2, 60, 16, dtype=torch.int32)}, 0, 4, BackendError, "w2: columns 0 to 60"),
    ],
)
def test_sizes_that_do_not_agree_are_refused_when_read(
    changes: dict[str, Any], expert: int, prepared: int, error: type[Exception], named: str
) -> None:
    """Nothing is read from beyond a tensor, nor from its end backwards."""
    with pytest.raises(error, match=named):
        TensorSource(**awq(**changes)).read(expert, prepared)


@pytest.mark.parametrize("offset", [0, 64, 192])
def test_one_group_per_column_is_the_same_on_every_rank(offset: int) -> None:
    """Wherever the rank's rows began, they are in the only group."""
    one = {name: awq()[name][:, :1] for name in ("w13_qzeros", "w13_scales", "w2_qzeros", "w2_scales")}
    one["w2_scales"] = torch.arange(256, dtype=torch.float16).view(2, 1, 128)
    down = TensorSource(**awq(**one, group=-1, w2_offset=offset)).read(1, 32).down
    assert torch.equal(down.scales, torch.arange(128, 256, dtype=torch.float16).expand(2, 128))


def test_names_of_another_format_are_refused() -> None:
    """A name that the format does not have, or lacks, is told with those that it has."""
    tensors = {name: tensor for name, tensor in awq().items() if name != "group"}
    assert TensorSource.of(AWQ, tensors, group=32).experts == 2
    with pytest.raises(BackendError, match=r"w13_qweight.*accepted are w13_weight_packed"):
        TensorSource.of(COMPRESSED, tensors, group=32)
    with pytest.raises(BackendError, match="w2_scales"):
        TensorSource.of(AWQ, {**tensors, "w2_scales": None}, group=32)
    with pytest.raises(BackendError, match="w13_g_idx"):
        TensorSource.of(GPTQ_V2, {**tensors, "w13_g_idx": torch.zeros(2, 128)}, group=32)


def test_a_checkpoints_expert_beyond_the_ranks_is_refused(tiny: Path) -> None:
    """Also a negative one, which Python would count from the end."""
    checkpoint = Checkpoint.open(tiny)
    layer = checkpoint.layer(0)
    facts = checkpoint.facts(layer, tensor_parallel=1, tensor_rank=0, device="cpu", expert_parallel=2, expert_rank=1)
    source = CheckpointSource(checkpoint, layer, facts)
    for expert in (-1, 8):
        with pytest.raises(BackendError, match="0 to 7"):
            source.read(expert, 32)


@pytest.mark.parametrize("name", ["w13_qweight", "w13_qzeros", "w13_scales", "w2_qweight", "w2_qzeros", "w2_scales"])
@pytest.mark.parametrize("kind", ["meta", "sparse_coo"])
def test_tensors_that_hold_nothing(tiny: Path, name: str, kind: str) -> None:
    """As one tensor of all experts, and as one of several: named with its kind."""
    source = held(tiny.parent, tiny.name, 0, AWQ, 32, 1, 0)
    dense = getattr(source, name)
    odd = dense.to("meta") if kind == "meta" else dense.to_sparse()
    with pytest.raises(BackendError, match=f"{name} is .*{kind}"):
        replace(source, **{name: odd})
    listed = [*dense]
    listed[1] = odd[1]
    with pytest.raises(BackendError, match=f"{name} of expert 1 is .*{kind}"):
        replace(source, **{name: listed}).read(1, 32)
