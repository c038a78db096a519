"""Checkpoints of every format, packed here in numpy from known numbers: no code of the package packs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.evidence.synthetic import Numbers, draw
from sm70_moe.numbers.codes import Codes
from sm70_moe.reading.source import CheckpointSource

Array = np.ndarray[Any, Any]
LAYER = "model.layers.0.mlp.experts"

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each nibble of an AWQ word holds, from the lowest."""
IN_ORDER = tuple(range(8))


def words(values: Array, order: tuple[int, ...] = IN_ORDER) -> Array:
    """Numbers (rows, 8 W) -> unsigned words (rows, W); `order[i]` is the value in nibble i."""
    eights = values.reshape(len(values), -1, 8).astype(np.uint64)
    return sum(eights[:, :, value] << np.uint64(4 * nibble) for nibble, value in enumerate(order))


def int32(unsigned: Array) -> Array:
    return (unsigned & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)


def awq(n: Numbers) -> dict[str, Array]:
    return {
        "qweight": int32(words(n.codes, AWQ_COLUMNS)),
        "qzeros": int32(words(n.zeros, AWQ_COLUMNS)),
        "scales": n.scales,
    }


def gptq(n: Numbers, less: int) -> dict[str, Array]:
    zeros = words(n.zeros) + np.uint64(2**32 - less)  # modulo 2^32: borrows go from column to column
    index = (np.arange(len(n.codes)) // n.group).astype(np.int32)
    return {"qweight": int32(words(n.codes.T)).T, "qzeros": int32(zeros), "scales": n.scales, "g_idx": index}


def compressed(n: Numbers) -> dict[str, Array]:
    return {
        "weight_packed": int32(words(n.codes.T)),
        "weight_zero_point": int32(words(n.zeros)).T,
        "weight_scale": n.scales.T,
        "weight_shape": np.array(n.codes.T.shape, np.int64),
    }


def scheme(symmetric: bool, group: int) -> dict[str, Any]:
    strategy = "channel" if group == -1 else "group"
    rows = None if group == -1 else group
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": rows}
    return {"targets": ["Linear"], "weights": weights, "input_activations": None}


@dataclass(frozen=True)
class Form:
    """How one format is written: tensors of a matrix and quantization_config."""

    store: Callable[[Numbers], dict[str, Array]]
    config: Callable[[int], dict[str, Any]]
    symmetric: bool = False


def awq_config(zero_point: bool) -> Callable[[int], dict[str, Any]]:
    return lambda group: {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": zero_point
    }  # fmt: skip


def gptq_config(version: str) -> Callable[[int], dict[str, Any]]:
    return lambda group: {
        "quant_method": "gptq", "checkpoint_format": version, "bits": 4, "group_size": group, "sym": False,
        "desc_act": False,
    }  # fmt: skip


def compressed_config(symmetric: bool) -> Callable[[int], dict[str, Any]]:
    return lambda group: {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme(symmetric, group)},
    }  # fmt: skip


FORMS = {
    "awq": Form(awq, awq_config(True)),
    "awq-symmetric": Form(awq, awq_config(False), symmetric=True),
    "compressed": Form(compressed, compressed_config(False)),
    "compressed-symmetric": Form(
        lambda n: {k: v for k, v in compressed(n).items() if k != "weight_zero_point"}, compressed_config(True), True
    ),
    "gptq-v1": Form(lambda n: gptq(n, 0x11111111), gptq_config("gptq")),
    "gptq-v2": Form(lambda n: gptq(n, 0), gptq_config("gptq_v2")),
}


@dataclass
class Made:
    """A checkpoint of one layer in memory: numbers by "0.gate", tensors by full name, config.json."""

    numbers: dict[str, Numbers]
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    prefix: str = LAYER
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    def weights(self, name: str) -> Array:
        """FP16 weights (K, N) by the contract's arithmetic, in FP64."""
        return decoded(self.numbers[name])


def decoded(n: Numbers | Codes) -> Array:
    """round16(q * scale + round16(-zero * scale)) of numpy or torch numbers."""
    codes, zeros, scales = (np.asarray(values).astype(np.float64) for values in (n.codes, n.zeros, n.scales))
    biases = (-zeros * scales).astype(np.float16).astype(np.float64)
    group = len(codes) // len(scales)
    found: Array = (codes * np.repeat(scales, group, 0) + np.repeat(biases, group, 0)).astype(np.float16)
    return found


def make(
    form: str, *, hidden: int = 128, intermediate: int = 96, experts: int = 2, group: int = 32, seed: int = 0
) -> Made:
    """Random numbers, zeros of 0 and 15 among them, in one of `FORMS`. Group -1 is one group per column."""
    rng, written = np.random.default_rng(seed), FORMS[form]
    numbers, tensors = {}, {}
    for expert in range(experts):
        for matrix in ("gate", "up", "down"):
            k, n = (intermediate, hidden) if matrix == "down" else (hidden, intermediate)
            found = draw(rng, (k, n), k if group == -1 else group)
            if written.symmetric:
                found = Numbers(found.codes, np.full_like(found.zeros, 8), found.scales)
            numbers[f"{expert}.{matrix}"] = found
            for kind, values in written.store(found).items():
                name = f"{LAYER}.{expert}.{matrix}_proj.{kind}"
                tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    config = {
        "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": hidden, "moe_intermediate_size": intermediate,
        "num_experts": experts, "num_experts_per_tok": min(2, experts), "num_hidden_layers": 1, "dtype": "float16",
        "quantization_config": written.config(group),
    }  # fmt: skip
    return Made(numbers, tensors, config)


def open_source(folder: Path, **ranks: Any) -> CheckpointSource:
    """The first layer's source for a rank, alone by default."""
    checkpoint = Checkpoint.open(folder)
    parallel = {"tensor_parallel": 1, "tensor_rank": 0, "device": "cpu", **ranks}
    layer = checkpoint.layers[0]
    return CheckpointSource(checkpoint, layer, checkpoint.facts(layer, **parallel))


@pytest.fixture
def made() -> Callable[..., Made]:
    return make


@pytest.fixture
def source() -> Callable[..., CheckpointSource]:
    return open_source


@pytest.fixture
def decode() -> Callable[[Numbers | Codes], Array]:
    return decoded


@pytest.fixture
def data() -> Path:
    """Files that other tools wrote."""
    return Path(__file__).parents[1] / "data"


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    """Every format that can be read, by the name that `made` takes."""
    name: str = request.param
    return name


@pytest.fixture
def stores() -> Mapping[str, Form]:
    return FORMS
