"""Every cell of tests/truth_table.toml: each row states its inputs in full, and is one test."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.decision import Outcome
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_build, fake_machine, settings

TABLE = tomllib.loads((Path(__file__).parent / "truth_table.toml").read_text())
CAPABILITIES = {"sm_70": (7, 0), "sm_80": (8, 0), "cpu": None, "unknown": (7, 0)}
DEVICES = {"sm_70": "cuda:0", "sm_80": "cuda:0", "cpu": "cpu", "unknown": None}
POLICY = load_policy("qwen3.8-flash-next-awq-tp4")


def machine(build: str, device: str) -> Machine:
    """The row's machine; the fake build holds images for sm_70 and sm_90."""
    made = None if build == "missing" else fake_build(stale=build == "stale", images={"sm_70", "sm_90"})
    return fake_machine(CAPABILITIES[device], made if made is not None else "missing")


def rows() -> list[Any]:
    found = []
    for feature, table in TABLE.items():
        for row in table["rows"].strip().splitlines():
            flag, facts, build, device, outcome, *reasons = row.split()
            name = f"{feature}-{flag}-{facts}-{build}-{device}"
            found.append(pytest.param(feature, flag, facts, build, device, outcome, reasons, id=name))
    return found


@pytest.mark.parametrize(("feature", "flag", "facts", "build", "device", "outcome", "reasons"), rows())
def test_cell(feature: str, flag: str, facts: str, build: str, device: str, outcome: str, reasons: list[str]) -> None:
    """The outcome and every reason are those of the row."""
    table = TABLE[feature]
    changes: dict[str, Any] = {"device": DEVICES[device]}
    if facts == "fails":
        changes |= table["fails"]
    if facts == "unknown":
        changes[table["unknown"]] = None
    flags = {feature: flag} if flag in ("0", "1") else {}

    admission = admit(POLICY, settings(flags), contract_facts(POLICY, **changes), machine(build, device))

    decision = admission.decision(feature)
    assert decision.outcome is Outcome(outcome.replace("-", " "))
    assert sorted(reason.name for reason in decision.reasons) == reasons


def test_table_is_complete() -> None:
    """Each combination of the four inputs stands in the table once for each route."""
    combinations = 3 * 3 * 4
    for feature, table in TABLE.items():
        states = 1 if feature == "legacy" else 3
        inputs = {tuple(row.split()[:4]) for row in table["rows"].strip().splitlines()}
        assert len(inputs) == len(table["rows"].strip().splitlines()) == states * combinations
