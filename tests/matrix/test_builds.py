"""Fallbacks with the real native build of an installation, on a machine without a GPU.

tox sets `MATRIX_FLAGS` (unset, off, require) together with the flag variables themselves, and
`MATRIX_NATIVE` (built, missing, stale). The installed package is copied into a folder of its own and
put into that state there; a process then admits a layer with what it finds. Nothing is faked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sm70_moe
from sm70_moe.kernels.build.images import RECORD

FLAGS = os.environ.get("MATRIX_FLAGS", "unset")
NATIVE = os.environ.get("MATRIX_NATIVE", "missing")

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


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the installed package in the cell's state."""
    place = tmp_path_factory.mktemp(NATIVE)
    shutil.copytree(PACKAGE, place / "sm70_moe", ignore=shutil.ignore_patterns("__pycache__"))
    if not (place / "sm70_moe" / "policies").exists():  # a checkout has them beside the package
        shutil.copytree(PACKAGE.parent / "policies", place / "policies")
    cubins = place / "sm70_moe" / "kernels" / "cubins"
    if NATIVE == "missing":
        shutil.rmtree(cubins, ignore_errors=True)
        return place
    if not (cubins / RECORD).is_file():
        text = "this installation has no native build"
        if "MATRIX_NATIVE" in os.environ:  # whoever asks for this cell must not be told that it passed
            pytest.fail(text)
        pytest.skip(text)
    if NATIVE == "stale":
        with (place / "sm70_moe" / "kernels" / "cuda" / "checksum.cu").open("a") as source:
            source.write("// edited after the build\n")
    return place


@pytest.fixture(scope="module")
def answer(installation: Path) -> dict:
    """What a new process decides there. No GPU is visible to it."""
    environment = os.environ | {"PYTHONPATH": str(installation), "CUDA_VISIBLE_DEVICES": ""}
    told = installation / "answer.json"  # standard output has the journal's events
    command = [sys.executable, "-c", ADMIT, str(told)]
    done = subprocess.run(command, env=environment, cwd=installation, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(told.read_text())


def test_each_native_route_says_why(answer: dict) -> None:
    """No GPU, and whatever is wrong with the build as well; with `0` the flag alone."""
    assert {name: answer["reasons"][name] for name in NATIVES} == dict.fromkeys(NATIVES, REASONS[FLAGS, NATIVE])
    assert {name: answer["outcomes"][name] for name in NATIVES} == dict.fromkeys(NATIVES, OUTCOMES[FLAGS])


def test_the_portable_route_is_there(answer: dict) -> None:
    """Whatever the build is, `legacy` is admitted, and deciding needs no torch."""
    assert answer["outcomes"]["legacy"] == "admitted"
    assert answer["torch"] is False


def test_the_build_is_what_the_cell_says(answer: dict) -> None:
    """Looked up unless every flag is 0; its id is the expected one where it is neither missing nor stale."""
    assert answer["looked_up"] is (FLAGS != "off")
    if FLAGS == "off" or NATIVE == "missing":
        assert answer["build"] is None
        return
    assert (answer["build"]["id"] == answer["build"]["expected"]) is (NATIVE == "built")
    assert "sm_70" in answer["build"]["images"]
