"""compressed-tensors' own library writes a file now, and decodes it: `tox -e formats`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.reading.source import CheckpointSource

pytest.importorskip("compressed_tensors", reason="the environment `formats` of tox has it")

VARIANTS = ["compressed-tensors-asymmetric", "compressed-tensors-symmetric"]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The script that made the files in tests/data."""
    path = Path(__file__).parents[1] / "data" / "make_compressed_tensors.py"
    spec = importlib.util.spec_from_file_location("make_compressed_tensors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("default")  # the library's own, and those of what it imports
def test_a_file_written_now(name: str, maker: Any, tmp_path: Path) -> None:
    """Every element of the decoded experts, bit by bit, from a file of this run."""
    maker.make(tmp_path, name)
    checkpoint = Checkpoint.open(tmp_path / name)
    for module, expected in load_file(tmp_path / name / "decoded.safetensors").items():
        layer, expert, projection = (module.split(".")[place] for place in (2, 5, 6))
        found = checkpoint.layers[int(layer)]
        source = CheckpointSource(
            checkpoint, found, checkpoint.facts(found, tensor_parallel=1, tensor_rank=0, device="cpu")
        )
        codes = getattr(source.read(int(expert), 32), projection.removesuffix("_proj"))
        steps = (codes.codes.int().view(len(codes.zeros), 32, -1) - codes.zeros.int().unsqueeze(1)).double()
        ours = (steps * codes.scales.double().unsqueeze(1)).flatten(0, 1).to(expected.dtype)
        assert torch.equal(ours.t().contiguous().view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("default")
def test_the_stored_file_is_what_the_library_writes(name: str, maker: Any, tmp_path: Path) -> None:
    """Packing has not changed since: the tensors in tests/data are those of this run."""
    maker.make(tmp_path, name)
    stored = load_file(Path(__file__).parents[1] / "data" / name / "model.safetensors")
    now = load_file(tmp_path / name / "model.safetensors")
    assert stored.keys() == now.keys()
    assert all(torch.equal(stored[key], now[key]) for key in stored)
