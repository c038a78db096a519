"""The vocabulary: a finding cannot be read as a truth value, nor fail without a reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sm70_moe.decision import Decision, Finding, Outcome, Reason, Status, plain


def test_finding_is_no_truth_value() -> None:
    """Five statuses do not fit into true and false."""
    with pytest.raises(TypeError):
        bool(Finding.passed("hidden", 1))


@pytest.mark.parametrize("status", [Status.FAIL, Status.UNKNOWN, Status.ERROR, Status.SKIPPED])
def test_no_rejection_without_a_reason(status: Status) -> None:
    """A finding that is not a pass cannot be made without a reason."""
    with pytest.raises(ValueError, match="hidden"):
        Finding("hidden", status)


def test_pass_has_no_reason() -> None:
    """A pass with a reason is a contradiction."""
    with pytest.raises(ValueError, match="hidden"):
        Finding("hidden", Status.PASS, Reason.HIDDEN)


def test_reasons_leave_out_skipped_checks() -> None:
    """A skipped check is shown among the obstacles, but it is no reason."""
    failed, skipped = Finding.failed("build", Reason.BUILD_MISSING), Finding.skipped("image", "build")
    decision = Decision("qpn", "route", Outcome.FELL_BACK, (Finding.passed("hidden"), failed, skipped))
    assert decision.reasons == (Reason.BUILD_MISSING,)
    assert decision.obstacles == (failed, skipped)


def test_records_are_plain_json() -> None:
    """A record survives a round through JSON unchanged."""
    finding = Finding.failed("architecture", Reason.ARCHITECTURE, ["sm_70"], "sm_80", "hint")
    record = Decision("qpn", "route", Outcome.REFUSED, (finding,), "require", "argument").record()
    assert json.loads(json.dumps(record)) == record
    assert record["findings"][0]["reason"] == "ARCHITECTURE"  # type: ignore[index,call-overload]  # a plain record


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def ring() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.float16, "torch.float16"),
        (torch.device("cuda:1"), "cuda:1"),
        (torch.zeros(2), "tensor([0., 0.])"),
        (np.float64("inf"), "inf"),
        (np.bool_(True), True),
        (Path("a/b"), "a/b"),
        (b"x", "b'x'"),
        ({(1, 2): {"b", "a"}}, {"(1, 2)": ["a", "b"]}),
        ((1, [2.5, None, True]), [1, [2.5, None, True]]),
        (float("nan"), "nan"),
        (Unprintable(), "Unprintable (RuntimeError)"),
    ],
)
def test_whatever_a_plug_in_observed_is_plain(value: object, expected: object) -> None:
    """A finding's record is JSON, and valid JSON, for any value."""
    record = Finding.failed("own", Reason.FORMAT, value, value).record()
    assert (record["expected"], record["observed"]) == (expected, expected)
    json.dumps(record, allow_nan=False)


def test_a_value_that_holds_itself_ends() -> None:
    """Deeper levels are told as text."""
    assert json.dumps(plain(ring())).startswith("[[[[[[[[")
