"""docs/prediction.md says what the command says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from sm70_moe.cli.app import app
from sm70_moe.errors import BackendError
from sm70_moe.prediction.hardware import GPUS, Range
from sm70_moe.prediction.readbuild import ReadBuild

PAGE = (Path(__file__).parents[2] / "docs" / "prediction.md").read_text(encoding="utf-8")


@pytest.fixture
def own_kernels(lacking: Callable[[str], NoReturn]) -> None:
    """The package's own build, of these sources."""
    try:
        stale = [ReadBuild.open(None, architecture).stale for architecture in ("sm_70", "sm_90")]
    except BackendError as error:
        lacking(str(error))
    if any(stale):
        lacking("the build is stale")


def printed(*arguments: str) -> list[str]:
    """Lines of the command, but for the build's id."""
    ended = CliRunner().invoke(app, ["predict", *arguments])
    assert ended.exit_code == 0
    return lines(ended.output)


def lines(text: str) -> list[str]:
    return [re.sub(r"build \w+", "", line).rstrip() for line in text.splitlines()]


@pytest.mark.usefixtures("own_kernels")
def test_tables_are_the_commands_output() -> None:
    """The console block is what `sm70-moe predict` prints on the package's own build, but for the build's id."""
    block = re.search(r"```console\n(predicted.*?)```", PAGE, re.DOTALL)
    assert block
    assert printed() == lines(block[1])


@pytest.mark.usefixtures("own_kernels")
def test_layers_with_other_metadata_are_the_commands_output() -> None:
    """So is the layer's table with the metadata that most of docs/evidence.md speaks of."""
    block = re.search(r"```console\n(M  D .*?)```", PAGE, re.DOTALL)
    assert block
    shown = printed("--metadata", "4-byte")
    start = next(i for i, line in enumerate(shown) if line.startswith("M  D "))
    assert shown[start : start + 5] == lines(block[1])


@pytest.mark.usefixtures("own_kernels")
def test_what_was_fitted_is_not_against_the_model() -> None:
    """As few rows outside as the page says."""
    shown = printed("--compare", str(Path(__file__).parents[2] / "docs" / "measurements" / "h200.json"))
    count = next(line for line in shown if "rows outside" in line)
    assert " ".join(count.split()[:4]) in PAGE


V100 = GPUS["v100-sxm2-16"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("clock, GHz", V100.clock),
        ("reached bandwidth, GB/s of 900", V100.reached),
        ("launch, us", V100.launch),
        ("L2 latency, cycles", V100.l2_latency),
        ("DRAM latency, cycles", V100.dram_latency),
        ("barrier of the grid, trips to L2", V100.trips),
        ("arrival of a block, cycles", V100.arrival),
    ],
)
def test_facts_are_those_of_the_code(name: str, known: Range) -> None:
    """Low, likely and high of each."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} "))
    assert [float(cell) for cell in row.split("|")[2:5]] == [known.low, known.likely, known.high]


def test_counts_are_those_of_the_kernels(hopper: ReadBuild, call) -> None:
    """Beside the hardware's counters stands what is counted on the cubins that are kept for the tests."""
    one, eight = (hopper.works(call(tokens), "sm_90")[0].slots for tokens in (1, 8))
    assert f"`w13_1` at M = 1 {one / 132 / 4:,.0f} instructions a scheduler" in PAGE
    assert f"{eight / 1e6:.2f} million" in PAGE


def test_page_begins_with_what_it_is() -> None:
    """Before any figure."""
    assert PAGE.splitlines()[2].startswith("**Predicted, never run on a V100.**")
    assert PAGE.index("never run on a V100") < PAGE.index("```")
