"""Four real gloo processes: agreement, and every way to disagree, without a hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "four_ranks.py"
LAYER = "model.layers.0.mlp.experts"
BATCHES = ["grouped_batch", "indexed_prefill", "native_prefill"]
NATIVE = ["qpn_m1", "grouped_decode", "native_decode", "legacy_single_token", *BATCHES, "legacy"]


TOGETHER = (
    "same",
    "flag",
    "build",
    "strict",
    "require",
    "wide",
    "refuses",
    "agrees",
    "breaks",
    "tunes",
    "lacks",
    "stops",
)
"""Scenarios after which the group goes on: one start for all of them."""

Came = dict[int, dict[str, Any]]


def ranks(scenarios: tuple[str, ...], folder: Path) -> dict[str, Came]:
    """Scenario -> rank -> what came out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, SCRIPT, ",".join(scenarios), folder], capture_output=True, text=True, check=False, timeout=120
    )
    found: dict[str, Came] = {scenario: {} for scenario in scenarios}
    for path in folder.iterdir():
        scenario, rank = path.stem.split(".")
        found[scenario][int(rank)] = json.loads(path.read_text(encoding="utf-8"))
    assert all(found.values()), done.stderr
    return found


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Came]:
    return ranks(TOGETHER, tmp_path_factory.mktemp("ranks"))


def test_alike_ranks_keep_their_plan(came: dict[str, Came]) -> None:
    """Nothing is taken back, nothing is said."""
    found = came["same"]
    assert {rank: one["routes"] for rank, one in found.items()} == {key: [NATIVE] for key in range(4)}
    assert all(one["others"] == [] for one in found.values())


@pytest.mark.parametrize(
    ("scenario", "odd", "routes", "reasons"),
    [
        (
            "flag",
            2,
            [name for name in NATIVE if name not in ("qpn_m1", "native_decode")],
            {"qpn_m1": ["FLAG_OFF"], "native_decode": ["FLAG_OFF"]},
        ),
        (
            "build",
            3,
            ["legacy_single_token", "legacy"],
            {key: ["BUILD_MISSING"] for key in ("qpn_m1", "grouped_decode", "native_decode", *BATCHES)},
        ),
    ],
)
def test_ranks_fall_back_together_and_say_for_whom(
    scenario: str, odd: int, routes: list[str], reasons: dict[str, list[str]], came: dict[str, Came]
) -> None:
    """All four take back what one has not; the three others name that rank, its layer and its reasons."""
    found = came[scenario]
    assert {rank: one["routes"] for rank, one in found.items()} == {key: [routes] for key in range(4)}
    for rank, one in found.items():
        told = {finding["observed"][0]["feature"]: finding for finding in one["others"]}
        assert set(told) == (set() if rank == odd else set(reasons))
        for feature, finding in told.items():
            (lack,) = finding["observed"]
            assert (finding["reason"], lack["rank"], lack["layer"]) == ("RANKS_DISAGREE", odd, LAYER)
            assert lack["reasons"] == reasons[feature]


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("strict", f"rank 2: {LAYER}: flags.qpn_m1 is 'off', 'auto' on rank 0"),
        ("require", f"{LAYER}: qpn_m1 is required on rank 1, not admitted on rank 3 (BUILD_MISSING)"),
    ],
)
def test_every_rank_raises_the_same(scenario: str, text: str, came: dict[str, Came]) -> None:
    """A policy that raises, or a required route, ends all four with one text that names rank and field."""
    found = came[scenario]
    assert [one["error"] for one in found.values()] == ["RankDisagreement"] * 4
    (told,) = {one["text"] for one in found.values()}
    assert text in told


def test_48_layers_name_every_odd_rank_and_its_first_fields(came: dict[str, Came]) -> None:
    """Alike layers are one difference: two odd ranks are two sentences, not 336."""
    (told,) = {one["text"] for one in came["wide"].values()}
    layers = f"{LAYER} and 47 more layers"
    assert told == (
        f"ranks hold different plans: {layers}: qpn_m1 is required on rank 2, not admitted on rank 3 (BUILD_MISSING); "
        f"rank 2: {layers}: flags.qpn_m1 is 'require', 'auto' on rank 0; "
        f"rank 3: {layers}: build is None, 'fake-build' on rank 0, "
        "outcomes.grouped_batch is 'fell back', 'admitted' on rank 0, "
        "outcomes.grouped_decode is 'fell back', 'admitted' on rank 0, and 5 more fields"
    )


@pytest.mark.parametrize("scenario", ["refuses", "agrees"])
def test_a_rank_that_refuses_says_so_to_the_others(scenario: str, came: dict[str, Came]) -> None:
    """The rank raises its own refusal; the others name the rank and its reason, at once."""
    found = came[scenario]
    assert {rank: one["error"] for rank, one in found.items()} == {
        0: "RankDisagreement",
        1: "AdmissionRefused",
        2: "RankDisagreement",
        3: "RankDisagreement",
    }
    for rank in (0, 2, 3):
        assert found[rank]["text"] == f"rank 1 refused: AdmissionRefused: {found[1]['text']}"
        assert "expected 32, found 128" in found[rank]["text"]
        assert found[rank]["seconds"] < 5


def test_a_rank_that_breaks_says_so_to_the_others(came: dict[str, Came]) -> None:
    """Whatever ends a rank's admission is passed on; the error itself stays what it is."""
    found = came["breaks"]
    assert (found[1]["error"], found[1]["text"]) == ("ZeroDivisionError", "division by zero")
    assert {found[rank]["text"] for rank in (0, 2, 3)} == {"rank 1 refused: ZeroDivisionError: division by zero"}


def test_all_ranks_are_tuned_as_rank_0_chose(came: dict[str, Came]) -> None:
    """Only rank 0 measures; one that cannot run its choice stops all, and so does what goes wrong on rank 0."""
    table = {"layer": {"indexed": {"16": "t16.2x1.4x1"}}}
    assert [one.get("table") for _, one in sorted(came["tunes"].items())] == [table] * 4
    lacking = {(one["error"], one["text"]) for one in came["lacks"].values()}
    assert lacking == {("RankDisagreement", "tuning: rank 2: no 't16.2x1.4x1'")}
    assert came["stops"][0]["error"] == "ZeroDivisionError"
    others = {(came["stops"][rank]["error"], came["stops"][rank]["text"]) for rank in (1, 2, 3)}
    assert others == {("RankDisagreement", "tuning: rank 0 stopped: ZeroDivisionError: division by zero")}


def test_a_rank_that_is_gone_is_named_at_once(tmp_path: Path) -> None:
    """No time-out is told where none was; only the rank that is gone is named, on a rank that comes later too."""
    found = ranks(("dies",), tmp_path)["dies"]
    assert set(found) == {0, 2, 3}
    for rank, one in found.items():
        assert one["error"] == "RankDisagreement"
        assert one["text"].startswith(f"rank {rank}: rank 1 was lost before it answered, after ")
        assert "rank 0 was lost" not in one["text"]
        assert "within" not in one["text"]
        assert one["seconds"] < 5


def test_a_rank_that_is_late_is_a_time_out(tmp_path: Path) -> None:
    """The three others wait their time and no longer, and name the rank that is missing."""
    found = ranks(("late",), tmp_path)["late"]
    for rank in (0, 2, 3):
        assert found[rank]["text"] == f"rank {rank}: no answer of rank 1 within 5 s"
        assert 5 <= found[rank]["seconds"] < 15
