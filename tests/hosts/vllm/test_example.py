"""The example that the documents point to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_generate.py"


def test_the_example_prints_tokens_and_writes_its_journal(experts_only, tmp_path):
    """Run as a user would, on AutoAWQ's experts (the config says float16): linears need a newer processor."""
    folder = experts_only.write(tmp_path / "m")
    found = subprocess.run(
        [sys.executable, str(EXAMPLE), str(folder), str(tmp_path / "moe.jsonl")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    rows = [line.split() for line in found.stdout.splitlines()[-2:]]
    assert [len(row) for row in rows] == [8, 8]
    assert all(0 <= int(token) < 512 for row in rows for token in row)
    lines = [json.loads(line) for line in (tmp_path / "moe.rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["outcome"] for line in lines if line.get("feature") == "legacy"] == ["admitted"]
