"""Groups and shards: every row of models.csv, and the refusals with their numbers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.decision import Finding, Reason, Status
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import Grouping, group_layer, source_group

ROWS = list(csv.DictReader((Path(__file__).parent / "data" / "models.csv").read_text().splitlines()))


def facts(hidden: int, intermediate: int, group: int, ranks: int) -> LayerFacts:
    return LayerFacts(
        layer="l", hidden=hidden, intermediate=intermediate, checkpoint_group=group, tensor_parallel=ranks
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['name']}-g{r['g']}-tp{r['tp']}")
def test_model_row(row: dict[str, str]) -> None:
    """The verdict of each geometry is the one in the table: native, re-grouped to N, or refused."""
    verdict = group_layer(facts(int(row["H"]), int(row["I"]), int(row["g"]), int(row["tp"])))
    plan = row["plan"]
    if plan in ("na", "none"):
        assert isinstance(verdict, Finding)
        assert verdict.reason is {"na": Reason.GROUP_INDIVISIBLE, "none": Reason.SHARD_CUTS_GROUP}[plan]
        return
    assert isinstance(verdict, Grouping)
    assert verdict.finding.status is Status.PASS
    assert verdict.regrouped == plan.startswith("prepare")
    assert verdict.widest == (int(plan.removeprefix("prepare")) if verdict.regrouped else int(row["g"]))


def test_all_rows_are_there() -> None:
    """The table has 30 geometries at four sizes and two groups; it is not cut short."""
    assert len(ROWS) == 240
    assert {row["plan"] for row in ROWS} == {"native", "prepare32", "prepare64", "none", "na"}


def test_refusal_has_numbers_and_alternatives() -> None:
    """A shard that cuts groups too finely says which numbers, and which sizes would work."""
    verdict = group_layer(facts(2560, 640, 128, 8))
    assert isinstance(verdict, Finding)
    assert verdict.observed == "gcd(80, 128) = 16"
    assert "tensor parallel 1, 2, 4," in verdict.hint
    assert "expert parallel" in verdict.hint


def test_refusal_of_one_group_for_each_column_names_the_group() -> None:
    """-1 is no number of rows: the refusal names it, and a gcd that is one (K of W13 is 2048, of W2 1408)."""
    verdict = group_layer(facts(2048, 1408, -1, 8))
    assert isinstance(verdict, Finding)
    assert verdict.reason is Reason.SHARD_CUTS_GROUP
    assert verdict.observed == "gcd(176, 1408, 2048) = 16 (group -1: one for each column)"


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (0, Reason.GROUP_SIZE),
        (-2, Reason.GROUP_SIZE),
        (16, Reason.SHARD_CUTS_GROUP),
        (96, Reason.GROUP_INDIVISIBLE),
        (3, Reason.GROUP_INDIVISIBLE),
    ],
)
def test_odd_group_is_refused(group: int, reason: Reason) -> None:
    """A group that no bank can have is refused with its own reason."""
    verdict = group_layer(facts(2048, 768, group, 1))
    assert isinstance(verdict, Finding)
    assert verdict.reason is reason


def test_one_group_per_column() -> None:
    """Group -1 stands for all of K; the shard then cuts it as it must."""
    verdict = group_layer(facts(2560, 640, -1, 4))
    assert isinstance(verdict, Grouping)
    assert (verdict.widest, verdict.regrouped) == (160, True)


def test_uneven_ranks_are_refused() -> None:
    """Ranks that do not divide the layer are refused; no row is dropped."""
    verdict = group_layer(facts(2560, 640, 32, 3))
    assert isinstance(verdict, Finding)
    assert (verdict.reason, verdict.observed) == (Reason.SHARD_UNEVEN, "640 over 3")


@pytest.mark.parametrize("missing", ["hidden", "intermediate", "checkpoint_group", "tensor_parallel"])
def test_missing_fact_is_unknown(missing: str) -> None:
    """A fact that was not given is unknown, never a pass."""
    given_facts = {"hidden": 2560, "intermediate": 640, "checkpoint_group": 32, "tensor_parallel": 4}
    verdict = group_layer(LayerFacts(layer="l", **{**given_facts, missing: None}))
    assert isinstance(verdict, Finding)
    assert verdict.status is Status.UNKNOWN


@given(st.integers(1, 8), st.integers(1, 64), st.sampled_from([32, 64, 128]), st.integers(1, 64))
def test_no_prepared_group_straddles(ranks: int, blocks: int, group: int, hidden_groups: int) -> None:
    """Every prepared group of every rank lies inside one group of the full matrix."""
    intermediate = 32 * ranks * blocks
    verdict = group_layer(facts(group * hidden_groups, intermediate, group, ranks))
    if isinstance(verdict, Finding):
        assert verdict.reason in (Reason.GROUP_INDIVISIBLE, Reason.SHARD_CUTS_GROUP)
        return
    rows = intermediate // ranks
    for rank in range(ranks):
        for start in range(0, rows, verdict.widest):
            ends = {source_group(row, rank * rows, group) for row in (start, start + verdict.widest - 1)}
            assert len(ends) == 1
