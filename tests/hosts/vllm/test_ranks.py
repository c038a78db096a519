"""Several processes, and the compiler: slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("generate.py")


def generate(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment["VLLM_CACHE_ROOT"] = str(folder.parent / "cache")
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


def tokens_in(found: subprocess.CompletedProcess[str]) -> list[list[int]]:
    lines = [line for line in found.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, found.stdout[-2000:] + found.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("TOKENS "))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_generate_what_one_does(experts_only, tmp_path, reference, journal, expert_parallel):
    """Tensor parallel 2, with and without expert parallel; both ranks write what they decided, alike."""
    found = generate(experts_only.write(tmp_path / "m"), tensor_parallel_size=2, enable_expert_parallel=expert_parallel)
    real, ties = reference.differences(tokens_in(found))
    assert (real, ties) == ([], [])
    decisions = [journal(rank=rank) for rank in (0, 1)]
    plans = [{line["plan"] for line in lines} for lines in decisions]
    assert plans[0] == plans[1]
    facts = [lines[0]["facts"] for lines in decisions]
    parallel = ("tensor_parallel", "tensor_rank", "expert_parallel", "expert_rank")
    expected = [(1, 0, 2, 0), (1, 0, 2, 1)] if expert_parallel else [(2, 0, 1, 0), (2, 1, 1, 0)]
    assert [tuple(fact[name] for name in parallel) for fact in facts] == expected


def test_a_compiled_engine_generates_the_same(engine, experts_only, tmp_path, reference, tokens):
    """Dynamo traces `apply` here: one opaque operator, no file access, no break. One process, to look inside."""
    from torch._dynamo.utils import counters

    counters.clear()
    found = tokens(engine(experts_only.write(tmp_path / "m"), enforce_eager=False))
    assert reference.differences(found) == ([], [])
    assert counters["stats"]["calls_captured"] > 0
    assert dict(counters["graph_break"]) == {}


def test_a_worker_s_refusal_is_in_the_output(experts_only, tmp_path):
    """vLLM's caller only hears that the core failed; the text stands in the same output, above."""
    del experts_only.tensors["model.layers.1.mlp.experts.3.gate_proj.qweight"]
    found = generate(experts_only.write(tmp_path / "m"))
    assert found.returncode != 0
    told = found.stdout + found.stderr
    assert "CheckpointError" in told
    assert "model.layers.1.mlp.experts.3.gate_proj.qweight" in told


def test_a_bad_flag_is_raised_where_the_user_stands(experts_only, tmp_path, monkeypatch):
    """The environment is read before any other process starts: the error is the caller's own."""
    monkeypatch.setenv("SM70_MOE_QPN_M1", "true")
    found = generate(experts_only.write(tmp_path / "m"))
    assert found.returncode != 0
    assert found.stderr.strip().splitlines()[-1].startswith("sm70_moe.errors.SettingsError: SM70_MOE_QPN_M1='true'")
