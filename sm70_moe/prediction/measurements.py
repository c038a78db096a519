"""Rows of `sm70-moe bench --json` or `--report`, as far as a model can speak of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm70_moe.errors import SettingsError
from sm70_moe.prediction.program import MOST_TOKENS
from sm70_moe.prediction.routing import KINDS

SCHEMA = 1

SEPARATOR, FLOOR, ROOFLINE, OURS, FUSED = "separator", "floor", "roofline", "ours", "fused"
ARMS = (SEPARATOR, FLOOR, ROOFLINE, OURS, FUSED)
PLAIN, DEPENDENT = "plain", "dependent"
BOTH = "both"


@dataclass(frozen=True, slots=True)
class Measured:
    """One row; `microseconds` a layer, the separating kernel's included."""

    arm: str
    launch: str
    part: str
    metadata: str
    tokens: int
    routing: str
    distinct: float
    microseconds: float

    @property
    def name(self) -> str:
        """Different for different rows of a run, once the fastest shape of a roofline is taken."""
        return f"{self.arm} {self.launch} {self.part} {self.metadata} M={self.tokens} {self.routing}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run on one GPU. `source` says where the numbers come from, `date` when, if the file says so."""

    gpu: str
    build: str
    policy: str
    source: str
    date: str
    rows: tuple[Measured, ...]

    def separator(self, row: Measured) -> float:
        """Microseconds of the separating kernel beside a row: the same number of tokens, else any. 0 without one."""
        found = [r for r in self.rows if r.arm == SEPARATOR]
        same = [r for r in found if r.tokens == row.tokens] or found
        return sum(r.microseconds for r in same) / len(same) if same else 0.0


def load_run(path: Path) -> Run:
    """Read a result. Raises SettingsError that names the file and what is wrong with it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}; accepted is a result of `sm70-moe bench`") from error
    try:
        return run_of(record, str(record.get("source") or path.name))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{path}: is no result of `sm70-moe bench`, schema {SCHEMA} ({problem})") from error


def run_of(record: Mapping[str, Any], source: str) -> Run:
    """Rows that the model speaks of: graphs, few tokens, right results; the fastest where a name stands twice."""
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema {record['schema']!r}")
    found: dict[str, Measured] = {}
    for row in record["rows"]:
        made = Measured(
            arm=str(row["arm"]),
            launch=str(row["launch"]),
            part=str(row["part"]),
            metadata=str(row["metadata"]),
            tokens=int(row["tokens"]),
            routing=str(row["routing"]),
            distinct=float(row["distinct"]),
            microseconds=float(row["microseconds"]),
        )
        known = made.arm in ARMS and made.launch in (PLAIN, DEPENDENT) and made.routing in KINDS
        if not known or not 1 <= made.tokens <= MOST_TOKENS or str(row.get("verdict", "")).startswith("wrong"):
            continue
        if made.name not in found or made.microseconds < found[made.name].microseconds:
            found[made.name] = made
    texts = (str(record["gpu"]["name"]), str(record["build"]), str(record["policy"]))
    return Run(*texts, source, str(record.get("date") or ""), tuple(found.values()))
