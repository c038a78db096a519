"""Benchmarks, not tests of time: `tox -e bench` prints them; docs/evidence.md has figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.facts import CallFacts
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def python(code: str) -> str:
    """What a new process prints. Raises if it fails."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_interpreter_alone(benchmark) -> None:
    """What a process costs before anything is imported; subtract it from the next."""
    assert benchmark(python, "pass") == ""


def test_import(benchmark) -> None:
    """`import sm70_moe` in a new process, which says nothing."""
    assert benchmark(python, "import sm70_moe") == ""


def test_import_of_what_decides(benchmark) -> None:
    """Everything that an engine needs to admit layers, in a new process."""
    assert benchmark(python, "from sm70_moe import AdmissionService, LayerFacts, load_policy") == ""


def test_admission_of_48_layers(benchmark) -> None:
    """48 layers of the first contract on a machine that has everything."""
    operator, machine = settings(), fake_machine()
    layers = [contract_facts(FIRST, f"model.layers.{i}.mlp.experts", index=i) for i in range(48)]
    admissions = benchmark(lambda: [admit(FIRST, operator, facts, machine) for facts in layers])
    assert all(a.supported for a in admissions)


@pytest.mark.parametrize("tokens", [1, 8, 127])
def test_route_selection(benchmark, tokens: int) -> None:
    """One call of `Plan.route`."""
    plan = Plan(admit(FIRST, settings(), contract_facts(FIRST), fake_machine()))
    assert benchmark(plan.route, CallFacts.usual(tokens, 2560, 10)) is not None


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of 48 layers x 512 experts over empty files."""
    folder = tmp_path_factory.mktemp("headers") / "checkpoint"
    write_sample(folder, hidden=2560, intermediate=640, experts=512, top_k=10, layers=48, group=32, seed=0, data=False)
    return folder


def test_explain_of_48_layers(benchmark, headers: Path) -> None:
    """The whole command in a new process."""
    script = Path(sys.executable).with_name("sm70-moe")
    command = [script, "explain", headers, "--tp", "4", "--capability", "7.0"]
    done = benchmark(subprocess.run, command, check=True, capture_output=True, text=True)
    assert "48 layers" in done.stdout
