"""Fallbacks with the real native build of an installation, on a machine without a GPU.

The installed package is copied into a folder of its own and the copy put into a state (built, missing,
stale); a process then admits a layer with what it finds, for each state of the flags. Nothing is faked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

import sm70_moe
from sm70_moe.kernels.build.images import RECORD

PACKAGE = Path(sm70_moe.__file__).parent
NATIVES = ("grouped_decode", "indexed_prefill", "qpn_m1")

REASONS = {
    ("unset", "built"): ["ARCHITECTURE", "DEVICE"],
    ("unset", "missing"): ["ARCHITECTURE", "DEVICE", "BUILD_MISSING"],
    ("unset", "stale"): ["ARCHITECTURE", "DEVICE", "BUILD_STALE"],
    ("off", "built"): ["FLAG_OFF"],
    ("off", "missing"): ["FLAG_OFF"],
    ("off", "stale"): ["FLAG_OFF"],
    ("require", "built"): ["ARCHITECTURE", "DEVICE"],
    ("require", "missing"): ["ARCHITECTURE", "DEVICE", "BUILD_MISSING"],
    ("require", "stale"): ["ARCHITECTURE", "DEVICE", "BUILD_STALE"],
}
"""Cell -> reasons of each native route for a layer on the CPU, whose architecture no contract names."""

OUTCOMES = {"unset": "fell back", "off": "off", "require": "refused"}

ADMIT = """
import json, pathlib, sys
from sm70_moe import AdmissionRefused, AdmissionService, load_policy
from sm70_moe.admission.exemplar import contract_facts

policy = load_policy("qwen3.8-flash-next-awq-tp4")
service = AdmissionService(policy=policy)
try:
    decisions = service.admit(contract_facts(policy, device="cpu")).decisions
except AdmissionRefused as refused:
    decisions = refused.decisions
build = service.machine.build
pathlib.Path(sys.argv[1]).write_text(json.dumps({
    "looked_up": service.machine.build_looked_up,
    "build": build and {"id": build.id, "expected": build.expected, "images": sorted(build.images)},
    "outcomes": {d.feature: d.outcome.value for d in decisions},
    "reasons": {d.feature: [r.name for r in d.reasons] for d in decisions},
    "torch": "torch" in sys.modules,
}))
"""


@dataclass(frozen=True)
class Answer:
    """What a new process decided: the cell's flags and build, and its report."""

    flags: str
    native: str
    told: dict[str, Any]


@pytest.fixture(scope="module", params=["built", "missing", "stale"])
def installation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lacking: Callable[[str], NoReturn]
) -> tuple[str, Path]:
    """A state of the native build, and a folder with a copy of the installed package in it."""
    native = request.param
    if native != "missing" and not (PACKAGE / "kernels" / "cubins" / RECORD).is_file():
        lacking("this installation has no native build")
    place = tmp_path_factory.mktemp(native)
    left = ("__pycache__", "cubins") if native == "missing" else ("__pycache__",)
    shutil.copytree(PACKAGE, place / "sm70_moe", ignore=shutil.ignore_patterns(*left))
    if not (place / "sm70_moe" / "policies").exists():  # a checkout has them beside the package
        shutil.copytree(PACKAGE.parent / "policies", place / "policies")
    if native == "stale":
        with (place / "sm70_moe" / "kernels" / "cuda" / "checksum.cu").open("a") as source:
            source.write("// edited after the build\n")
    return native, place


@pytest.fixture
def answer(installation: tuple[str, Path], flags: str, tmp_path: Path) -> Answer:
    """No GPU is visible to the process."""
    native, place = installation
    environment = os.environ | {"PYTHONPATH": str(place), "CUDA_VISIBLE_DEVICES": ""}
    path = tmp_path / "answer.json"  # standard output has the journal's events
    command = [sys.executable, "-c", ADMIT, str(path)]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Answer(flags, native, json.loads(path.read_text()))


def test_what_each_cell_decides(answer: Answer) -> None:
    """Native routes: no GPU, and whatever is wrong with the build as well; with `0` the flag alone.

    `legacy` is admitted whatever the build is, and deciding needs no torch. The build is looked up unless
    every flag is 0; its id is the expected one where it is neither missing nor stale.
    """
    told, cell = answer.told, (answer.flags, answer.native)
    assert {name: told["reasons"][name] for name in NATIVES} == dict.fromkeys(NATIVES, REASONS[cell])
    assert {name: told["outcomes"][name] for name in NATIVES} == dict.fromkeys(NATIVES, OUTCOMES[answer.flags])
    assert (told["outcomes"]["legacy"], told["torch"]) == ("admitted", False)
    assert told["looked_up"] is (answer.flags != "off")
    if answer.flags == "off" or answer.native == "missing":
        assert told["build"] is None
        return
    assert (told["build"]["id"] == told["build"]["expected"]) is (answer.native == "built")
    assert "sm_70" in told["build"]["images"]
