"""Values of a checkpoint's metadata, each looked at once while it is read, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sm70_moe import AdmissionService, Settings
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.cli.app import app
from sm70_moe.errors import CheckpointError
from sm70_moe.reading.source import CheckpointSource

Make = Callable[..., Any]
LAYER = "model.layers.0.mlp.experts"
SCALES = ("scales", "weight_scale")


def scales_of(layer: Any, matrix: str) -> tuple[str, torch.Tensor, bool]:
    """Name and tensor of a matrix's scales, and whether groups come first."""
    name = next(name for name in layer.tensors if f".{matrix}." in name and name.endswith(SCALES))
    return name, layer.tensors[name], name.endswith(".scales")


def source_of(folder: Path, **ranks: int) -> CheckpointSource:
    checkpoint = Checkpoint.open(folder)
    layer, parallel = checkpoint.layers[0], {"tensor_parallel": 1, "tensor_rank": 0, **ranks}
    return CheckpointSource(checkpoint, layer, checkpoint.facts(layer, device="cpu", **parallel))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scale_that_is_no_number_stops_the_reading(
    form: str, value: float, dtype: torch.dtype, tmp_path: Path, made: Make
) -> None:
    """Tensor, group and column are named, whichever way the experts are read."""
    layer = made(form)
    for name in [name for name in layer.tensors if name.endswith(SCALES)]:
        layer.tensors[name] = layer.tensors[name].to(dtype)
    name, scales, groups_first = scales_of(layer, "1.down_proj")
    scales[(2, 45) if groups_first else (45, 2)] = value
    source = source_of(layer.write(tmp_path))
    source.read(0, 32)
    for read in (lambda: source.read(1, 32), lambda: source.read_rows(1, 32), lambda: source.read_batch(range(2), 32)):
        with pytest.raises(CheckpointError) as caught:
            read()
        told = str(caught.value)
        assert all(text in told for text in [f"tensor {name}", "group 2", "column 45", str(value), "1 of 384"])


def test_places_are_the_whole_matrix_s(tmp_path: Path, made: Make) -> None:
    """The second rank of three reads rows 32 to 63 of down: group 1 is its first."""
    layer = made("awq")
    name, scales, _ = scales_of(layer, "0.down_proj")
    scales[1, 7] = float("nan")
    folder = layer.write(tmp_path)
    source_of(folder, tensor_parallel=3, tensor_rank=0).read(0, 32)
    with pytest.raises(CheckpointError, match=rf"{name}.*group 1 of rows, column 7"):
        source_of(folder, tensor_parallel=3, tensor_rank=1).read(0, 32)


def test_prepare_and_verify_end_with_the_name(tmp_path: Path, made: Make) -> None:
    """Report scale-nan-inf-bf16: nothing is written, nothing is judged."""
    layer = made("compressed-symmetric")
    name, scales, _ = scales_of(layer, "0.gate_proj")
    scales[3, 1] = float("inf")
    folder = layer.write(tmp_path / "in")
    for command in (["verify", str(folder), "--tokens", "1"], ["prepare", str(folder), str(tmp_path / "out")]):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, CheckpointError)
        assert name in str(result.exception)
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_a_dead_expert_is_read_and_told(form: str, tmp_path: Path, made: Make) -> None:
    """Report dead-expert-scale-1e-23: every weight of that expert is 0 (CONTRACT 8.2), in any format."""
    layer = made(form)
    for name in [name for name in layer.tensors if name.endswith(SCALES)]:
        layer.tensors[name] = layer.tensors[name].bfloat16()
        if ".1." in name:
            layer.tensors[name].fill_(1e-23)
    source = source_of(layer.write(tmp_path))
    assert source.remarks == ()
    dead = source.read(1, 32)
    assert all(not matrix.scales.any() for matrix in (dead.gate, dead.up, dead.down))
    (told,) = source.remarks
    assert f"tensor {LAYER}.1.gate_proj" in told
    assert "2 more tensors" in told
    assert "1152 scales" in told
    source.read_rows(1, 32)
    assert source.remarks == (told,)


def test_a_service_tells_of_a_dead_expert(tmp_path: Path, made: Make) -> None:
    """Once a layer, as an event of its own."""
    layer = made("compressed")
    for name in [name for name in layer.tensors if name.endswith(SCALES)]:
        layer.tensors[name] = layer.tensors[name].bfloat16()
    scales_of(layer, "0.up_proj")[1][0, 0] = -1e-30
    folder = layer.write(tmp_path)
    told: list[tuple[str, dict[str, Any]]] = []

    class Ear:
        def admitted(self, admission: Any) -> None: ...
        def flush(self) -> None: ...
        def event(self, name: str, level: str = "info", **fields: Any) -> None:
            told.append((name, fields))

    checkpoint = Checkpoint.open(folder)
    facts = checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")
    with AdmissionService(Settings(), sinks=[Ear()]) as service:
        service.layer(facts, CheckpointSource(checkpoint, checkpoint.layers[0], facts))
    ((_, fields),) = [one for one in told if one[0] == "moe weights"]
    assert fields["layer"] == LAYER
    assert "0.up_proj" in fields["text"]


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_two_numbers_are_two_numbers(dtype: torch.dtype, tmp_path: Path, made: Make) -> None:
    """Report weight-shape-int32: whatever integers a writer chose for the shape."""
    layer = made("compressed")
    for name in [name for name in layer.tensors if name.endswith("weight_shape")]:
        layer.tensors[name] = layer.tensors[name].to(dtype)
    folder = layer.write(tmp_path)
    assert CliRunner().invoke(app, ["inspect", str(folder)]).exit_code == 0
    source_of(folder).read_batch(range(2), 32)
    broken = next(name for name in layer.tensors if "1.up_proj.weight_shape" in name)
    layer.tensors[broken] = torch.tensor([96, 64]).to(dtype)
    with pytest.raises(CheckpointError, match=rf"{broken}: \[96, 64\]; the other tensors are of \[96, 128\]"):
        source_of(layer.write(tmp_path / "bad")).read_batch(range(2), 32)


@pytest.mark.parametrize("permuted", [False, True])
def test_row_groups_of_either_width(permuted: bool, tmp_path: Path, made: Make) -> None:
    """`g_idx` as INT64 is read, and a permuted one is still seen."""
    layer = made("gptq-v1")
    for name in [name for name in layer.tensors if name.endswith("g_idx")]:
        found = layer.tensors[name].long()
        layer.tensors[name] = found.flip(0) if permuted else found
    folder = layer.write(tmp_path)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.layers[0].quantization.packing == ("gptq, act-order" if permuted else "gptq")
    if not permuted:
        source_of(folder).read(0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_a_shape_of_other_numbers_is_refused(dtype: torch.dtype, tmp_path: Path, made: Make) -> None:
    """Fractions and bytes hold no sizes."""
    layer = made("compressed")
    name = next(name for name in layer.tensors if "1.up_proj.weight_shape" in name)
    layer.tensors[name] = layer.tensors[name].to(dtype)
    assert CliRunner().invoke(app, ["inspect", str(layer.write(tmp_path))]).exit_code == 1


def test_w2_sums_beyond_fp16_are_infinite_and_said(tmp_path: Path, made: Make) -> None:
    """Report w2-overflow-before-router-weight: infinite by CONTRACT 8.5, nothing is exceeded; the expert is named."""
    layer = made("awq")
    name, scales, _ = scales_of(layer, "1.down_proj")
    layer.tensors[name] = torch.full_like(scales, 4000.0)
    folder = layer.write(tmp_path)
    result = CliRunner().invoke(app, ["verify", str(folder), "--tokens", "2", "--json"])
    (one,) = [json.loads(result.stdout)["results"][0]]
    assert result.exit_code == 0
    assert one["beyond"] == [1]
    assert one["largest"] > 65504
    assert max(one["w13"], one["w2"], one["out"]) <= 1
    told = CliRunner().invoke(app, ["verify", str(folder), "--tokens", "2"]).stdout
    assert "experts 1 lie beyond FP16" in " ".join(told.split())
    layer.config["dtype"] = "float32"
    result = CliRunner().invoke(app, ["verify", str(layer.write(tmp_path / "wide")), "--tokens", "2", "--json"])
    assert json.loads(result.stdout)["results"][0]["beyond"] == []
