"""Sums of W2 beyond FP16 before the router's weight, said when the banks are made (CONTRACT 8.5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sm70_moe import AdmissionService, Settings
from sm70_moe.banks.reach import LARGEST, NOTABLE, far_reaching, reach_text
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.cli.app import app
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.rows import Rows
from sm70_moe.reading.source import CheckpointSource

Make = Callable[..., Any]


class Ear:
    """A sink that keeps the events of one name."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def admitted(self, admission: Any) -> None: ...
    def flush(self) -> None: ...
    def event(self, name: str, level: str = "info", **fields: Any) -> None:
        if name == "moe weights":
            self.told.append(fields)


def served(
    folder: Path, settings: Settings | None = None, dtype: str = "float16", **ranks: int
) -> list[dict[str, Any]]:
    """The layer is made by a service; what is said of its weights."""
    checkpoint, ear = Checkpoint.open(folder), Ear()
    found = checkpoint.layers[0]
    facts = checkpoint.facts(found, tensor_parallel=1, tensor_rank=0, device="cpu", **ranks)
    facts = replace(facts, activations=dtype)
    with AdmissionService(settings or Settings(), sinks=[ear]) as service:
        service.layer(facts, CheckpointSource(checkpoint, found, facts))
    return ear.told


def wide(layer: Any, expert: int, factor: float) -> None:
    """Multiply the scales of an expert's down matrix."""
    name = next(n for n in layer.tensors if f".{expert}.down_proj." in n and n.endswith(("scales", "weight_scale")))
    layer.tensors[name] = layer.tensors[name] * factor


def test_the_first_record_names_the_expert(form: str, tmp_path: Path, made: Make) -> None:
    """Report w2-overflow-before-router-weight: one event when the layer is made, with expert and numbers."""
    layer = made(form, intermediate=128)
    folder = layer.write(tmp_path / "plain")
    assert served(folder) == []
    wide(layer, 1, 10000.0)
    reach = np.abs(decoded_down(layer)).sum(0).max()
    folder = layer.write(tmp_path / "wide")
    (fields,) = served(folder)
    assert fields["layer"] == "model.layers.0.mlp.experts"
    assert "experts 1:" in fields["text"]
    assert f"{reach:.6g}" in fields["text"]
    for dtype in ("float32", "bfloat16"):
        assert served(folder, dtype=dtype) == []


def decoded_down(layer: Any) -> Any:
    """Expert 1's weights (K, N) with scales 10,000 times as large, by the contract's arithmetic."""
    n = layer.numbers["1.down"]
    scales = (n.scales.astype(np.float32) * 10000).astype(np.float16).astype(np.float64)
    biases = (-n.zeros.astype(np.float64) * scales).astype(np.float16).astype(np.float64)
    group = len(n.codes) // len(scales)
    return (n.codes * np.repeat(scales, group, 0) + np.repeat(biases, group, 0)).astype(np.float16).astype(np.float64)


def test_experts_have_the_numbers_of_the_whole_layer(tmp_path: Path, made: Make) -> None:
    """On the second of two ranks the only wide expert is 3; on the first nothing is said."""
    layer = made("awq", experts=4)
    wide(layer, 3, 20000.0)
    folder = layer.write(tmp_path)
    assert served(folder, expert_parallel=2, expert_rank=0) == []
    (fields,) = served(folder, expert_parallel=2, expert_rank=1)
    assert "experts 3:" in fields["text"]


def test_prepared_banks_remember_it(tmp_path: Path, made: Make) -> None:
    """Said where banks come out of the cache too; `prepare` says it when it makes them."""
    layer = made("compressed")
    wide(layer, 0, 10000.0)
    folder = layer.write(tmp_path / "in")
    settings = Settings(cache=tmp_path / "kept")
    first, second = served(folder, settings), served(folder, settings)
    assert first == second != []
    told = CliRunner().invoke(app, ["prepare", str(folder), str(tmp_path / "out")])
    assert told.exit_code == 0
    assert "experts 0:" in told.stderr


def rows(scale: float, zeros: int = 8, code: int = 15, count: int = 64) -> Rows:
    """One expert whose weights all are (code - zero) * scale."""
    return Rows.of(
        Codes(
            torch.full((count, 8), code, dtype=torch.uint8),
            torch.full((count // 32, 8), zeros, dtype=torch.uint8),
            torch.full((count // 32, 8), scale).half(),
        )
    ).alone


@pytest.mark.parametrize(
    ("scale", "zeros", "code", "found"),
    [
        (9.125, 8, 15, {}),  # 64 x 7 x 9.125 = 4088
        (9.25, 8, 15, {0: 4144.0}),
        (-9.25, 8, 15, {0: 4144.0}),
        (9.25, 8, 8, {}),  # large scales, and every weight is 0
        (30000.0, 0, 15, {0: float("inf")}),  # weights that FP16 does not hold
        (0.0, 8, 15, {}),
    ],
)
def test_what_is_notable(scale: float, zeros: int, code: int, found: dict[int, float]) -> None:
    """Above 65504 / 16, whatever the sign; a large scale alone is nothing."""
    assert NOTABLE == 4094.0
    assert far_reaching(rows(scale, zeros, code)) == found


def test_a_sum_leaves_fp16_where_the_text_says(made: Make) -> None:
    """Activations with the signs of one column: a little below the number all is finite, a little above it is not."""
    weights = made("awq", intermediate=64).weights("0.down").astype(np.float64) * 4000
    reach = np.abs(weights).sum(0).max()
    signs = np.sign(weights[:, np.abs(weights).sum(0).argmax()])
    edge = LARGEST / reach
    with np.errstate(over="ignore"):
        sums = [(signs * edge * factor @ weights).astype(np.float16) for factor in (0.999, 1.001)]
    assert [bool(np.isinf(one).any()) for one in sums] == [False, True]


def test_many_experts_are_counted() -> None:
    """The first eight by number, the widest with its figures."""
    assert reach_text({}) == ""
    told = reach_text({expert: 5000.0 + expert for expert in range(12)}, first=100)
    assert "100, 101, 102, 103, 104, 105, 106, 107 and 4 more" in told
    assert "expert 111" in told
    assert "5011" in told
