"""A build that stays as it is, measurements written down by hand, and the sizes of the first contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.native.launch import Step
from sm70_moe.layout import Metadata
from sm70_moe.prediction.fit import fit
from sm70_moe.prediction.hardware import GPUS
from sm70_moe.prediction.measurements import Run, load_run
from sm70_moe.prediction.parameters import Fitted
from sm70_moe.prediction.readbuild import ReadBuild, steps_of
from sm70_moe.prediction.routing import Routing
from sm70_moe.prediction.work import Call

DATA = Path(__file__).parents[1] / "data" / "prediction"
FIRST = Geometry(hidden=2560, intermediate=160, experts=512, top_k=10, group=32)


def call_for(tokens: int, metadata: str = "4-byte", routing: str = "uniform") -> Call:
    return Call(FIRST, Metadata(metadata), tokens, Routing.of(routing, tokens, FIRST.top_k, FIRST.experts))


def frozen_steps(call: Call, architecture: str) -> tuple[Step, ...]:
    """What was launched for the first contract when the build was kept; the sources have gone on since."""
    steps = json.loads((DATA / "steps.json").read_text())
    if str(call.tokens) not in steps:
        return steps_of(call, architecture)
    axes = {"metadata": str(call.metadata), "order": "octet32"}
    return tuple(Step(source, kernel, grid=tuple(grid), axes=axes) for source, kernel, grid in steps[str(call.tokens)])


def as_kept(build: ReadBuild) -> ReadBuild:
    """A build of the kept build with its own manifests and steps."""
    return replace(build, manifests=load_manifests(DATA / "manifests"), steps=frozen_steps)


@pytest.fixture(scope="session")
def frozen() -> Path:
    """Decode kernels of 29 November 2026, sm_70 and sm_90: counts of tests do not change with the sources."""
    return DATA / "build"


@pytest.fixture(scope="session")
def volta(frozen: Path) -> ReadBuild:
    return as_kept(ReadBuild.open(frozen, "sm_70"))


@pytest.fixture(scope="session")
def hopper(frozen: Path) -> ReadBuild:
    return as_kept(ReadBuild.open(frozen, "sm_90"))


@pytest.fixture(scope="session")
def one_launch() -> Path:
    """All three decode kernels of 29 November 2026, first contract, 4-byte metadata, sm_70 and sm_90."""
    return DATA / "one-launch" / "build"


def with_fused(folder: Path, architecture: str) -> ReadBuild:
    """That build with its own manifests; what is launched for one token follows from the sizes alone."""
    return replace(ReadBuild.open(folder, architecture), manifests=load_manifests(folder.parent / "manifests"))


@pytest.fixture(scope="session")
def volta_fused(one_launch: Path) -> ReadBuild:
    return with_fused(one_launch, "sm_70")


@pytest.fixture(scope="session")
def hopper_fused(one_launch: Path) -> ReadBuild:
    return with_fused(one_launch, "sm_90")


@pytest.fixture(scope="session")
def run() -> Run:
    return load_run(DATA / "h200-run9.json")


@pytest.fixture(scope="session")
def fitted(run: Run, hopper: ReadBuild) -> Fitted:
    return fit(run, hopper, FIRST, GPUS["h200"], "2026-11-29")


@pytest.fixture(scope="session")
def call() -> Callable[..., Call]:
    """Calls of the first contract: tokens, then metadata and routing."""
    return call_for
