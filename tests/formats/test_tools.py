"""Whole models that tools wrote (tests/data/tools): mixed bits, skipped layers, shared experts, MTP layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.quantization import Quantization
from sm70_moe.cli.app import app
from sm70_moe.numbers.codes import Codes
from sm70_moe.reading.source import CheckpointSource

NONE = Quantization("none")


def gptq(bits: int) -> Quantization:
    return Quantization("gptq", "gptq", bits, 32, False)


AWQ = Quantization("awq", "gemm", 4, 32, True)

WRITTEN = {
    "llm-compressor": [
        Quantization("compressed-tensors", "pack-quantized", 4, 32, True),
        Quantization("compressed-tensors", "pack-quantized", 8, 32, False),
        NONE,
        NONE,
    ],
    "auto-round": [gptq(4), gptq(8), NONE, gptq(4)],
    "auto-round-gptq": [gptq(4), gptq(8), NONE, NONE],
    "auto-round-awq": [AWQ, AWQ, NONE, NONE],
    "autoawq": [AWQ, AWQ],
}
"""What each layer with experts is; the last of four is the MTP layer. AutoAWQ's first layer is dense."""

DECODED = {name: "auto-round" if name == "auto-round-gptq" else name for name in WRITTEN}


@pytest.fixture(params=list(WRITTEN))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def source(checkpoint: Checkpoint, layer: str) -> CheckpointSource:
    (found,) = [one for one in checkpoint.layers if one.name == layer]
    facts = checkpoint.facts(found, tensor_parallel=1, tensor_rank=0, device="cpu")
    return CheckpointSource(checkpoint, found, facts)


def weights(codes: Codes, dtype: torch.dtype) -> torch.Tensor:
    """(code - zero) * scale (N, K), exact in FP64 and rounded once, as the tools do."""
    groups = len(codes.zeros)
    steps = (codes.codes.int().view(groups, -1, codes.codes.shape[1]) - codes.zeros.int().unsqueeze(1)).double()
    return (steps * codes.scales.double().unsqueeze(1)).flatten(0, 1).to(dtype).t()


def test_every_layer_is_what_the_tool_made_of_it(name: str, data: Path) -> None:
    """Bits, group and zeros by layer, with shared experts and a router beside each; MTP has no number."""
    checkpoint = Checkpoint.open(data / "tools" / name)
    assert [layer.quantization for layer in checkpoint.layers] == WRITTEN[name]
    assert all(layer.beside == ("shared experts", "router") for layer in checkpoint.layers)
    facts = [checkpoint.facts(one, tensor_parallel=1, tensor_rank=0, device="cpu") for one in checkpoint.layers]
    assert {(f.hidden, f.intermediate, f.experts, f.top_k, f.arithmetic) for f in facts} == {(64, 32, 2, 2, "plain")}
    assert [f.index for f in facts] == ([1, 2] if name == "autoawq" else [0, 1, 2, None])


def test_every_element_is_what_the_tool_decodes(name: str, data: Path) -> None:
    """Bit for bit in the tool's own dtype."""
    checkpoint = Checkpoint.open(data / "tools" / name)
    decoded = load_file(data / "tools" / "decoded" / f"{DECODED[name]}.safetensors")
    assert len(decoded) == 3
    for module, expected in decoded.items():
        layer, _, tail = module.partition(".experts.")
        expert, projection = tail.split(".")
        codes = source(checkpoint, f"{layer}.experts").read(int(expert), 32)
        assert torch.equal(weights(getattr(codes, projection.removesuffix("_proj")), expected.dtype), expected)


def test_a_quantised_mtp_layer_is_read(data: Path) -> None:
    """Its source is a copy of layer 0, and auto-round rounds to nearest: the same codes and scales."""
    checkpoint = Checkpoint.open(data / "tools" / "auto-round")
    mtp, first = source(checkpoint, "mtp.layers.0.mlp.experts"), source(checkpoint, "model.layers.0.mlp.experts")
    for expert in range(2):
        for matrix in ("gate", "up", "down"):
            one, other = (getattr(found.read(expert, 32), matrix) for found in (mtp, first))
            assert torch.equal(weights(one, torch.float32), weights(other, torch.float32))


def test_explain_answers_each_layer(name: str, data: Path) -> None:
    """Four bits are admitted; eight bits are refused as that; what is not quantised is the engine's."""
    result = CliRunner().invoke(app, ["explain", str(data / "tools" / name), "--json"])
    assert result.exit_code == 0
    groups = json.loads(result.stdout)["groups"]
    supported = {layer: group["supported"] for group in groups for layer in group["layers"]}
    assert sorted(supported.values()) == sorted(one.bits == 4 for one in WRITTEN[name])
