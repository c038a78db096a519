"""Errors travel between processes as they are: engines send them from workers."""

from __future__ import annotations

import copy
import pickle

import pytest

from sm70_moe.decision import Decision, Finding, Outcome, Reason
from sm70_moe.errors import AdmissionRefused, DriftError, PolicyError, SettingsError

FINDING = Finding.failed("hidden", Reason.HIDDEN, 1, 2)
DECISION = Decision("qpn_m1", "route", Outcome.REFUSED, (FINDING,), "require", "argument")


@pytest.mark.parametrize(
    "error",
    [
        AdmissionRefused("model.layers.0", [DECISION], "refused: hidden"),
        DriftError([FINDING], "changed"),
        PolicyError(["a.toml:1: one", "a.toml:2: two"]),
        SettingsError("name"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_survive_pickling_and_copying(error: Exception) -> None:
    """Type, text and attached decisions come back the same."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
