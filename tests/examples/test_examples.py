"""The examples run as they stand, in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "tiny-qwen3-moe-awq"


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_embed_in_your_engine() -> None:
    """Both layers of a real checkpoint are admitted and run."""
    out = run(sys.executable, ROOT / "examples" / "embed_in_your_engine.py", TINY)
    assert "supported 2/2" in out
    assert len(re.findall(r"^model\.layers\.\d\.mlp\.experts \[.*'legacy'\] \|out\| \d", out, re.MULTILINE)) == 2


def test_embedding_takes_thirty_lines() -> None:
    """What an engine must write stays small."""
    lines = (ROOT / "examples" / "embed_in_your_engine.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 30


def test_four_ranks_add_up_to_one() -> None:
    """Four gloo ranks agree, run their slices and sum to the whole layer within FP16 rounding of each share."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    out = run(*torchrun, ROOT / "examples" / "tensor_parallel.py", TINY)
    found = re.findall(r"(\d+) tokens: largest difference (\S+) of (\S+)", out)
    assert [int(tokens) for tokens, _, _ in found] == [1, 8, 64]
    # each rank's share is rounded to FP16 per slot and once more: a few ulps of the largest value
    assert all(float(difference) <= 4 * 2**-10 * float(largest) for _, difference, largest in found)
