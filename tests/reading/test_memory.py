"""What loading takes of memory, by the operating system's own count, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sm70_moe.checkpoint.sample import write_sample

LOAD = """
import json, sys
from pathlib import Path
from sm70_moe.layout import BankLayout, Metadata
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.reading.loading import prepare
from sm70_moe.reading.source import CheckpointSource

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

def load(folder, layer):
    checkpoint = Checkpoint.open(folder)
    facts = checkpoint.facts(checkpoint.layer(layer), tensor_parallel=2, tensor_rank=1, device="cpu")
    source = CheckpointSource(checkpoint, checkpoint.layer(layer), facts)
    layout = BankLayout("octet32", Metadata.THREE_BYTE, 32, True, True)
    return prepare(source, layout, source.share.shape, "cpu", readers=2)

load(sys.argv[1], 0)  # what torch, threads and allocators take once is not the loading's
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
banks = [load(sys.argv[2], layer) for layer in range(3)]
print(json.dumps({"taken": status("VmHWM") - before, "banks": [bank.nbytes for bank in banks]}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of peak memory")
def test_loading_takes_the_banks_and_little_more(tmp_path: Path) -> None:
    """Three layers of 30 MB banks a rank, read by two threads: the peak stays under the banks and one layer.

    The files have twice the banks' size, and codes twice that of words: neither is ever held for a layer.
    """
    sizes = {"hidden": 2048, "intermediate": 1024, "top_k": 2, "group": 32, "seed": 0}
    write_sample(tmp_path / "one", **sizes, experts=4, layers=1)
    write_sample(tmp_path / "three", **sizes, experts=16, layers=3)
    found = json.loads(
        subprocess.run(
            [sys.executable, "-c", LOAD, str(tmp_path / "one"), str(tmp_path / "three")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    weights = 16 * 3 * 2048 * 512
    assert found["banks"] == [weights // 2 + weights // 32 * 3] * 3
    assert found["taken"] < sum(found["banks"]) + found["banks"][0]
