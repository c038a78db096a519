"""Figures of docs/evidence.md are those of the measurements that are kept beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm70_moe.benchmark.result import Row, load_result

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "evidence.md").read_text(encoding="utf-8")
TOKENS = (1, 2, 4, 8)
ROWS = [row for name in ("h200", "h200-compact") for row in load_result(DOCS / "measurements" / f"{name}.json").rows]


def fastest(arm: str, launch: str, metadata: str, tokens: int, routing: str = "uniform") -> Row | None:
    """The row of a whole layer; of the roofline's shapes the fastest."""
    key = (arm, launch, "both", metadata, tokens, routing)
    found = [r for r in ROWS if (r.arm, r.launch, r.part, r.metadata, r.tokens, r.routing) == key]
    return min(found, key=lambda row: row.microseconds, default=None)


def cells(title: str, after: str = "") -> list[str]:
    """The cells behind a row's title, empty ones too; of the first such row behind the text `after`."""
    lines = PAGE[PAGE.index(after) :].splitlines()
    line = next(line for line in lines if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize(
    ("title", "arm", "launch", "ratio"),
    [
        ("roofline, plain launches", "roofline", "plain", False),
        ("roofline, dependent launch", "roofline", "dependent", False),
        ("ours, dependent launch", "ours", "dependent", True),
        ("ours, plain launches", "ours", "plain", True),
        ("fused, one launch", "fused", "plain", True),
    ],
)
def test_times_and_ratios(title: str, arm: str, launch: str, ratio: bool) -> None:
    """Medians, and their ratios to the fastest plain roofline of the same run."""
    for tokens, cell in zip(TOKENS, cells(title), strict=True):
        row, roof = fastest(arm, launch, "4-byte", tokens), fastest("roofline", "plain", "4-byte", tokens)
        assert roof is not None
        shown = "" if row is None else f"{row.microseconds:.2f}"
        assert cell == (f"{shown} = {row.microseconds / roof.microseconds:.2f} x" if ratio and row else shown)


@pytest.mark.parametrize("metadata", ["3-byte", "2.5-byte"])
def test_compact_metadata(metadata: str) -> None:
    """Times, and how much slower they are than 4-byte metadata."""
    title = f"{metadata} metadata"
    for tokens, time, more in zip(TOKENS, cells(title), cells("beside 4-byte", after=f"| {title} |"), strict=True):
        row, whole = fastest("ours", "dependent", metadata, tokens), fastest("ours", "dependent", "4-byte", tokens)
        assert row is not None
        assert whole is not None
        assert time == f"{row.microseconds:.2f}"
        assert float(more.removesuffix(" %")) == pytest.approx(
            100 * (row.microseconds / whole.microseconds - 1), abs=0.06
        )


@pytest.mark.parametrize(
    ("title", "arm", "launch"),
    [
        ("4-byte, all tokens on the same experts", "ours", "dependent"),
        ("their roofline, plain launches", "roofline", "plain"),
    ],
)
def test_overlapping_routing(title: str, arm: str, launch: str) -> None:
    """All tokens on the same experts."""
    for tokens, cell in zip(TOKENS, cells(title), strict=True):
        row = fastest(arm, launch, "4-byte", tokens, "overlapping")
        assert cell == ("" if row is None else f"{row.microseconds:.2f}")


def test_the_portable_route() -> None:
    """What the page says of `legacy`, and that a layer takes it milliseconds."""
    times = [row.microseconds for tokens in TOKENS if (row := fastest("legacy", "plain", "4-byte", tokens))]
    assert " / ".join(f"{time:,.0f}" for time in times) in " ".join(PAGE.split())


def test_the_hosts_time() -> None:
    """The fastest and the slowest of the kept files."""
    hosts = [host for path in (DOCS / "measurements").glob("*.json") for host in load_result(path).host]
    found = [host.microseconds for host in hosts]
    assert f"{min(found):.1f} to {max(found):.1f} us" in " ".join(PAGE.split())


def test_everything_that_was_timed_was_right() -> None:
    """No kept measurement is of a wrong result, and all are of one build."""
    assert {row.verdict for row in ROWS if row.part == "both" and row.arm in ("ours", "fused", "legacy")} == {"right"}
    builds = {load_result(path).build for path in (DOCS / "measurements").glob("*.json")}
    assert len(builds) == 1
    assert builds.pop()[:16] in PAGE
