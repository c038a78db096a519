"""Four real gloo processes: agreement, and every way to disagree, without a hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "four_ranks.py"
NATIVE = "qpn_m1,legacy_single_token,grouped_decode,indexed_prefill,legacy"


def ranks(scenario: str, folder: Path) -> dict[int, tuple[int, str]]:
    """Rank -> (seconds, what came out)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, SCRIPT, scenario, folder], capture_output=True, text=True, check=False, timeout=120
    )
    found = {int(path.stem): path.read_text(encoding="utf-8").split(" ", 1) for path in folder.iterdir()}
    assert found, done.stderr
    return {rank: (int(seconds), text) for rank, (seconds, text) in found.items()}


@pytest.mark.parametrize(
    ("scenario", "routes"),
    [
        ("same", NATIVE),
        ("flag", NATIVE.removeprefix("qpn_m1,")),
        ("build", "legacy_single_token,legacy"),
    ],
)
def test_ranks_end_with_the_same_routes(scenario: str, routes: str, tmp_path: Path) -> None:
    """Alike ranks keep their plan; with one odd rank all four take back what it has not."""
    assert {rank: text for rank, (_, text) in ranks(scenario, tmp_path).items()} == dict.fromkeys(range(4), routes)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("strict", ("rank 2", "flags.qpn_m1")),
        ("require", ("qpn_m1 is required",)),
    ],
)
def test_every_rank_raises_the_same(scenario: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """A policy that raises, or a required route, ends all four with one text that names rank and field."""
    found = ranks(scenario, tmp_path)
    texts = {text for _, text in found.values()}
    assert len(found) == 4
    assert len(texts) == 1
    assert all(word in text for word in words for text in texts)


@pytest.mark.parametrize("scenario", ["dies", "late"])
def test_a_rank_that_does_not_answer_is_an_error_within_seconds(scenario: str, tmp_path: Path) -> None:
    """The three others raise soon; nobody hangs."""
    found = ranks(scenario, tmp_path)
    others = {rank: found[rank] for rank in (0, 2, 3)}
    assert all(seconds <= 15 for seconds, _ in others.values())
    assert all(text.startswith("RankDisagreement: rank") for _, text in others.values())
