"""Files that other tools wrote, against the weights that those tools themselves decode from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.quantization import Quantization
from sm70_moe.evidence.oracle import matrix
from sm70_moe.numbers.codes import Codes
from sm70_moe.reading.source import CheckpointSource

Array = np.ndarray[Any, Any]

WRITTEN = {
    "compressed-tensors-asymmetric": [
        Quantization("compressed-tensors", "pack-quantized", 4, 32, True),
        Quantization("compressed-tensors", "pack-quantized", 4, -1, True),
    ],
    "compressed-tensors-symmetric": [Quantization("compressed-tensors", "pack-quantized", 4, 128, False)] * 2,
    "gptq-v1-asymmetric": [
        Quantization("gptq", "gptq", 4, 32, True),
        Quantization("gptq", "gptq", 4, 128, True),
    ],
    "gptq-v2-symmetric": [Quantization("gptq", "gptq_v2", 4, 128, False)] * 2,
}


@pytest.fixture(params=list(WRITTEN))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def sources(folder: Path, **ranks: int) -> list[CheckpointSource]:
    checkpoint = Checkpoint.open(folder)
    parallel: dict[str, Any] = {"tensor_parallel": 1, "tensor_rank": 0, "device": "cpu", **ranks}
    return [CheckpointSource(checkpoint, one, checkpoint.facts(one, **parallel)) for one in checkpoint.layers]


def test_what_the_files_are(data: Path, name: str) -> None:
    """Format, packing, bits, group and zeros of both layers, and that every tensor is as it must be."""
    checkpoint = Checkpoint.open(data / name)
    assert [layer.quantization for layer in checkpoint.layers] == WRITTEN[name]
    for layer in checkpoint.layers:
        geometry = checkpoint.check(layer)
        assert (geometry.hidden, geometry.intermediate, layer.experts) == (256, 128, 4)
        assert (layer.complete, layer.beside) == (True, ("router",))


def test_every_element_is_what_the_tool_decodes(data: Path, name: str) -> None:
    """(code - zero) * scale in the tool's own dtype gives the tool's own bits."""
    decoded = load_file(data / name / "decoded.safetensors")
    assert len(decoded) == 9
    found = sources(data / name)
    for module, expected in decoded.items():
        layer, expert, projection = (module.split(".")[place] for place in (2, 5, 6))
        k = expected.shape[1]
        codes = getattr(found[int(layer)].read(int(expert), 32), projection.removesuffix("_proj"))
        steps = (codes.codes.int().view(k // 32, 32, -1) - codes.zeros.int().unsqueeze(1)).double()
        # exact in FP64, so that this rounds once, as the tool does
        ours = (steps * codes.scales.double().unsqueeze(1)).flatten(0, 1).to(expected.dtype)
        assert torch.equal(ours.t().contiguous().view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("name", ["compressed-tensors-asymmetric", "gptq-v1-asymmetric"])
def test_zeros_at_both_ends_of_their_range_occur(data: Path, name: str) -> None:
    """The files would not show a wrong offset, borrow or wrap otherwise."""
    zeros = torch.cat([sources(data / name)[0].read(expert, 32).gate.zeros for expert in range(4)])
    assert set(zeros.unique().tolist()) >= {0, 1, 8, 14, 15}


def test_zeros_less_one_have_borrowed(data: Path) -> None:
    """Adding 1 to every nibble by itself gives other zeros: the file has words that borrowed."""
    tensors = load_file(data / "gptq-v1-asymmetric" / "model.safetensors")
    stored = tensors["model.layers.0.mlp.experts.0.gate_proj.qzeros"].numpy().view(np.uint32)
    alone = np.stack([((stored >> np.uint32(4 * n)) + 1) & 15 for n in range(8)], axis=-1).reshape(8, 128)
    ours = sources(data / "gptq-v1-asymmetric")[0].read(0, 32).gate.zeros.numpy()
    assert 0.01 < np.mean(alone != ours) < 0.2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_slices_and_the_oracle_agrees(
    data: Path, name: str, ranks: int, decode: Callable[[Codes], Array]
) -> None:
    """The reference's own reading of the whole matrices, cut, has the bits of every rank's codes."""
    checkpoint = Checkpoint.open(data / name)
    width = 128 // ranks
    for rank in range(ranks):
        mine = slice(rank * width, (rank + 1) * width)
        found = sources(data / name, tensor_parallel=ranks, tensor_rank=rank)
        for layer, source in zip(checkpoint.layers, found, strict=True):
            codes = source.read(3, 32)
            for part, rows, columns in (
                ("gate", slice(None), mine), ("up", slice(None), mine), ("down", mine, slice(None))
            ):  # fmt: skip
                expected = matrix(checkpoint, layer, 3, part).weights(rows, columns)
                assert np.array_equal(decode(getattr(codes, part)).astype(np.float64), expected)


def test_bf16_scales_are_noted(data: Path) -> None:
    """A layer whose scales are converted says so, one with FP16 scales has nothing to say."""
    notes = [layer.notes for layer in Checkpoint.open(data / "compressed-tensors-symmetric").layers]
    assert all(len(of_layer) == 1 and "BF16" in of_layer[0] for of_layer in notes)
    assert all(not layer.notes for layer in Checkpoint.open(data / "gptq-v2-symmetric").layers)
