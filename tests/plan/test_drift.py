"""Drift: what has changed since plans were made, each thing with what it was and what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sm70_moe.decision import Reason, Status
from sm70_moe.machine.machine import Machine
from sm70_moe.plan.drift import HINT, Origin, Present, drift
from sm70_moe.settings.settings import Settings
from sm70_moe.testing import fake_machine

MACHINE = fake_machine()
THEN = Origin(Settings.from_env({"SM70_MOE_STRICT": "1"}), {"a": "1" * 64, "b": "2" * 64}, MACHINE)
SAME = Present({"SM70_MOE_STRICT": "1"}, THEN.policies, MACHINE)

Told = list[tuple[str, Reason | None, object, object]]


def changed(now: Present, then: Origin = THEN) -> Told:
    """Check, reason, before and after of everything that is not as it was."""
    return [(f.check, f.reason, f.expected, f.observed) for f in drift(then, now) if f.status is not Status.PASS]


def test_nothing_changed() -> None:
    """One finding each for the environment, every policy, the build and the devices."""
    found = drift(THEN, SAME)
    assert [f.check for f in found] == ["environment", "policy a", "policy b", "native build", "devices"]
    assert {f.status for f in found} == {Status.PASS}
    assert (found[1].observed, found[3].observed) == ("1" * 64, "fake-build")
    assert found[4].observed == ["cuda:0 sm_70", "cpu cpu"]


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (
            replace(SAME, environment={"SM70_MOE_STRICT": "0", "SM70_MOE_POLICY": "x"}),
            [
                ("environment SM70_MOE_POLICY", Reason.ENVIRONMENT_CHANGED, None, "x"),
                ("environment SM70_MOE_STRICT", Reason.ENVIRONMENT_CHANGED, "1", "0"),
            ],
        ),
        (
            replace(SAME, policies={"a": "3" * 64, "b": None}),
            [
                ("policy a", Reason.POLICY_CHANGED, "1" * 64, "3" * 64),
                ("policy b", Reason.POLICY_CHANGED, "2" * 64, None),
            ],
        ),
        (
            replace(SAME, machine=fake_machine(build="stale")),
            [("native build", Reason.BUILD_CHANGED, "fake-build", "fake-build-of-yesterday")],
        ),
        (
            replace(SAME, machine=fake_machine(build="missing")),
            [("native build", Reason.BUILD_CHANGED, "fake-build", None)],
        ),
        (
            replace(SAME, machine=fake_machine((9, 0))),
            [("devices", Reason.MACHINE_CHANGED, ["cuda:0 sm_70", "cpu cpu"], ["cuda:0 sm_90", "cpu cpu"])],
        ),
    ],
)
def test_what_changed_is_told_with_before_and_after(now: Present, told: Told) -> None:
    """And nothing else is."""
    assert changed(now) == told


def test_whatever_changed_says_what_to_do() -> None:
    """The same hint for each kind of change."""
    other = fake_machine(capability=(9, 0), build="stale")
    now = Present({"SM70_MOE_STRICT": "0"}, {"a": "3" * 64, "b": None}, other)
    found = drift(THEN, now)
    assert [f.status for f in found] == [Status.FAIL] * 5
    assert {f.hint for f in found} == {HINT}
    assert HINT


def test_a_build_that_was_never_looked_up_cannot_change() -> None:
    """Every native flag was 0: skipped, with a word why."""
    never: Machine = replace(MACHINE, build=None, build_looked_up=False)
    (finding,) = [f for f in drift(replace(THEN, machine=never), SAME) if f.check == "native build"]
    assert (finding.status, finding.reason) == (Status.SKIPPED, Reason.PREREQUISITE)
    assert finding.observed


def test_values_of_unknown_variables_are_not_told() -> None:
    """A name under our prefix may be another program's, and its value a secret; one that a policy reads is known."""
    before = Settings.from_env({"SM70_MOE_TOKEN": "hunter2", "SM70_MOE_GONE": "hunter3", "SM70_MOE_OWN": "1"})
    then = replace(THEN, settings=before, aliases=frozenset({"SM70_MOE_OWN"}))
    now = replace(SAME, environment={"SM70_MOE_TOKEN": "hunter4", "SM70_MOE_OWN": "0", "SM70_MOE_NEW": "hunter5"})
    found = {check: (old, new) for check, _, old, new in changed(now, then)}
    assert found == {
        "environment SM70_MOE_GONE": ("a value", None),
        "environment SM70_MOE_NEW": (None, "another value"),
        "environment SM70_MOE_OWN": ("1", "0"),
        "environment SM70_MOE_TOKEN": ("a value", "another value"),
    }
    assert "hunter" not in str(drift(then, now))
