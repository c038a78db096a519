"""Experts as one tensor with the expert first, gate and up as halves of it, in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import CheckpointError
from sm70_moe.evidence.oracle import matrix
from sm70_moe.numbers.codes import Codes

LAYER = "model.layers.0.mlp.experts"
ALONG = {"weight_packed": 0, "weight_zero_point": 0, "weight_scale": 0}
"""Dimension of the columns, where it is not the last."""
SHAPES = ("weight_shape", "g_idx")


def stacked(layer: Any, joint: str = ".", fused: bool = True, sizes: bool = True) -> Any:
    """The same numbers with the experts in front, gate and up in one tensor or each in its own."""
    experts = 1 + max(int(name.partition(".")[0]) for name in layer.numbers)
    kinds = {name.rpartition(".")[2] for name in layer.tensors}
    found = {}
    for kind in kinds:
        stacks = {
            part: torch.stack([layer.tensors[f"{LAYER}.{e}.{part}_proj.{kind}"] for e in range(experts)])
            for part in ("gate", "up", "down")
        }
        if fused and kind not in SHAPES:
            both = torch.cat((stacks.pop("gate"), stacks.pop("up")), dim=1 + ALONG.get(kind, 1))
            stacks["gate_up"] = both
        elif fused:
            stacks["gate_up"] = stacks.pop("up")
            del stacks["gate"]
        for part, values in stacks.items():
            if kind == "weight_shape":
                if not sizes:
                    continue
                width = values[0, 0] * (2 if part == "gate_up" else 1)
                values = torch.tensor([experts, width, values[0, 1]])
            found[f"{LAYER}.{part}_proj{joint}{kind}"] = values.contiguous()
    layer.tensors = found
    return layer


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 2)])
def test_stacks_read_like_experts_by_themselves(
    form: str,
    fused: bool,
    ranks: int,
    rank: int,
    tmp_path: Path,
    made: Callable[..., Any],
    source: Callable[..., Any],
    decode: Callable[[Codes], Any],
) -> None:
    """Every expert's slices, and the oracle's whole matrices."""
    layer = stacked(made(form, hidden=64, intermediate=96, experts=3, seed=4), fused=fused)
    folder = layer.write(tmp_path)
    checkpoint = Checkpoint.open(folder)
    found = source(folder, tensor_parallel=ranks, tensor_rank=rank)
    width = 96 // ranks
    mine = slice(rank * width, (rank + 1) * width)
    for expert in range(3):
        codes = found.read(expert, 32)
        assert np.array_equal(decode(codes.gate), layer.weights(f"{expert}.gate")[:, mine])
        assert np.array_equal(decode(codes.up), layer.weights(f"{expert}.up")[:, mine])
        assert np.array_equal(decode(codes.down), layer.weights(f"{expert}.down")[mine])
        for part in ("gate", "up", "down"):
            whole = matrix(checkpoint, checkpoint.layers[0], expert, part).weights(slice(None), slice(None))
            assert np.array_equal(whole, layer.weights(f"{expert}.{part}").astype(np.float64))


def test_parameters_without_modules(
    tmp_path: Path, made: Callable[..., Any], source: Callable[..., Any], decode: Callable[[Codes], Any]
) -> None:
    """`experts.gate_up_proj_qweight` is read as `experts.gate_up_proj.qweight` is, if the config says AWQ."""
    layer = stacked(made("awq", hidden=64), joint="_")
    codes = source(layer.write(tmp_path)).read(1, 32)
    assert np.array_equal(decode(codes.up), layer.weights("1.up"))


def test_stacks_of_another_method_are_named(tmp_path: Path, made: Callable[..., Any]) -> None:
    """Olive stores its parameters under such names, in another packing: its method tells."""
    layer = stacked(made("awq", hidden=64), joint="_")
    layer.config["quantization_config"] = {"quant_method": "olive", "bits": 4, "group_size": 32}
    checkpoint = Checkpoint.open(layer.write(tmp_path))
    facts = checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")
    assert (facts.format, facts.experts, facts.hidden, facts.intermediate) == ("olive", 2, 64, 96)
    with pytest.raises(CheckpointError, match="olive"):
        checkpoint.check(checkpoint.layers[0])


def test_stacks_may_leave_out_their_sizes(tmp_path: Path, made: Callable[..., Any], source: Callable[..., Any]) -> None:
    """Some writers of stacks leave `weight_shape` out; the other tensors have the sizes too."""
    layer = stacked(made("compressed", hidden=64), sizes=False)
    assert source(layer.write(tmp_path)).read(0, 32).gate.codes.shape == (64, 96)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("gate_up_proj.qweight", (2, 64, 23), ["[2, 64, 23]", "[2, 64, 24]"]),
        ("gate_up_proj.scales", (2, 2, 190), ["intermediate size 96", "95"]),
        ("gate_up_proj.scales", (2, 2, 191), ["191", "even"]),
        ("down_proj.qzeros", (3, 3, 8), ["[3, 3, 8]", "[2, 3, 8]"]),
        ("down_proj.qweight", (96, 8), ["[96, 8]", "[2, 96, 8]"]),
        ("gate_up_proj.qweight", (64, 24), ["[64, 24]", "3 dimensions"]),
    ],
)
def test_a_stack_of_another_shape_is_named(
    tmp_path: Path, made: Callable[..., Any], name: str, shape: tuple[int, ...], named: list[str]
) -> None:
    """The tensor, what it is and what it must be."""
    layer = stacked(made("awq", hidden=64))
    key = f"{LAYER}.{name}"
    layer.tensors[key] = torch.zeros(shape, dtype=layer.tensors[key].dtype)
    checkpoint = Checkpoint.open(layer.write(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(checkpoint.layers[0])
    assert all(text in str(caught.value) for text in named)


def test_a_stack_without_a_tensor_is_incomplete(tmp_path: Path, made: Callable[..., Any]) -> None:
    """The missing one is named."""
    layer = stacked(made("gptq-v2", hidden=64))
    del layer.tensors[f"{LAYER}.down_proj.scales"]
    assert Checkpoint.open(layer.write(tmp_path)).layers[0].missing == (f"{LAYER}.down_proj.scales",)


def test_a_bias_of_stacked_experts_is_a_fact(tmp_path: Path, made: Callable[..., Any]) -> None:
    """gpt-oss has one, under a name of its own: such a layer is refused for it."""
    layer = stacked(made("awq", hidden=64))
    layer.tensors[f"{LAYER}.gate_up_proj_bias"] = torch.zeros(2, 192, dtype=torch.float16)
    checkpoint = Checkpoint.open(layer.write(tmp_path))
    facts = checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")
    assert (facts.format, facts.bias) == ("awq", True)
