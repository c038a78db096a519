"""Small checkpoints, whole or broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sm70_moe.weights.sample import write_sample

Arrays = dict[str, np.ndarray[Any, Any]]

LAYER = "model.layers.0.mlp.experts"
SIZES = {"hidden": 64, "intermediate": 96, "experts": 3, "top_k": 2, "layers": 1, "group": 32, "seed": 7}


@pytest.fixture
def tiny() -> Path:
    """A checkpoint that AutoAWQ wrote: 2 layers, 16 experts, hidden 256, intermediate 128, group 32."""
    return Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A complete folder of one file: hidden 64, intermediate 96, 3 experts, group 32."""
    write_sample(tmp_path / "good", **SIZES)
    return tmp_path / "good"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files with an index."""
    write_sample(tmp_path / "sharded", **SIZES, shard_bytes=8_000)
    return tmp_path / "sharded"


@pytest.fixture
def alter(good: Path) -> Callable[..., Path]:
    """Changes the tensors, top-level config keys or quantization_config keys of the good folder."""

    def change(
        edit: Callable[[Arrays], Any] | None = None,
        config: dict[str, Any] | None = None,
        quantization: dict[str, Any] | None = None,
    ) -> Path:
        arrays = load_file(good / "model.safetensors")
        if edit is not None:
            edit(arrays)
        save_file(arrays, good / "model.safetensors")
        content = json.loads((good / "config.json").read_text())
        content.update(config or {})
        content["quantization_config"].update(quantization or {})
        (good / "config.json").write_text(json.dumps(content))
        return good

    return change
