"""A file that is replaced at a random moment while its layers are loaded: the old layers, the new ones, or an error."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.errors import CheckpointError
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import settings

SIZES = {"hidden": 256, "intermediate": 256, "experts": 24, "top_k": 4, "layers": 2, "group": 32}
FILE = "model.safetensors"
CHANGED = "changed since its header was read"


def loaded(folder: Path) -> list[torch.Tensor]:
    """The answers of every layer to one call."""
    x = torch.randn(5, SIZES["hidden"], generator=torch.Generator().manual_seed(1)).half()
    ids = torch.arange(20, dtype=torch.int32).view(5, 4) % SIZES["experts"]
    opened, found = Checkpoint.open(folder), []
    with AdmissionService(settings()) as service:
        for layer in opened.layers:
            facts = opened.facts(layer, tensor_parallel=1, tensor_rank=0, device="cpu")
            made = service.layer(facts, CheckpointSource(opened, layer, facts))
            found.append(made(x, ids, torch.full((5, 4), 0.25)))
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_swaps_at_random_moments(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Two checkpoints of the same sizes, so that nothing but its identity tells one file from the other."""
    for seed in (0, 1):
        write_sample(tmp_path / str(seed), **SIZES, seed=seed)
    start = time.monotonic()
    old = loaded(tmp_path / "0")
    most, new = time.monotonic() - start, loaded(tmp_path / "1")
    assert not same(old, new)
    here, source, told = tmp_path / "here", random.Random(5), Counter[str]()
    shutil.copytree(tmp_path / "0", here)

    def swap(after: float) -> None:
        time.sleep(after)
        os.replace(here / "next", here / FILE)

    for _ in range(4 * pytestconfig.getoption("--kills")):
        shutil.copy2(tmp_path / "0" / FILE, here / FILE)
        shutil.copy2(tmp_path / "1" / FILE, here / "next")
        thread = threading.Thread(target=swap, args=(source.uniform(0, most),))
        thread.start()
        try:
            found = loaded(here)
        except CheckpointError as error:
            told["noticed" if CHANGED in str(error) else str(error)] += 1
        else:
            told["old" if same(found, old) else "new" if same(found, new) else "mixed"] += 1
        thread.join()
    print(json.dumps(told))
    assert told.keys() <= {"old", "new", "noticed"}
    assert told.total() == 4 * pytestconfig.getoption("--kills")
