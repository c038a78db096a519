"""Known flags under a name that a policy does not have: neither a `1` nor a `0` disappears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from sm70_moe.settings.flags import FlagState, FlagValue
from sm70_moe.settings.settings import Settings

QPN = "VLLM_SM70_AWQ_QWEN38_QPN_M1"
REQUIRE, OFF = FlagState.REQUIRE, FlagState.OFF


@dataclass(frozen=True)
class Feature:
    """A policy's feature, as far as settings look at it."""

    env: tuple[str, ...] = ()
    unset: str = "auto"


@dataclass(frozen=True)
class Policy:
    """A policy, as far as settings look at it."""

    features: Mapping[str, Feature] = field(default_factory=dict)


NONE, UNDER_THE_OLD_NAME, UNDER_ITS_OWN = Policy(), Policy({"qpn_m1": Feature((QPN,))}), Policy({"qpn_m1": Feature()})


@pytest.mark.parametrize(
    ("environment", "arguments", "policy", "found"),
    [
        ({}, {}, NONE, {}),
        ({QPN: "1"}, {}, UNDER_THE_OLD_NAME, {}),
        ({QPN: "0"}, {}, UNDER_THE_OLD_NAME, {}),
        ({"SM70_MOE_QPN_M1": "1"}, {}, UNDER_THE_OLD_NAME, {}),
        ({"SM70_MOE_QPN_M1": "1"}, {}, UNDER_ITS_OWN, {}),
        ({QPN: "1"}, {}, NONE, {QPN: FlagValue(REQUIRE, f"environment {QPN}")}),
        ({QPN: "0"}, {}, NONE, {}),
        ({QPN: "1"}, {}, UNDER_ITS_OWN, {QPN: FlagValue(REQUIRE, f"environment {QPN}")}),
        ({QPN: "0"}, {}, UNDER_ITS_OWN, {QPN: FlagValue(OFF, f"environment {QPN}")}),
        (
            {QPN: "1", "SM70_MOE_GROUPED_DECODE": "1"},
            {},
            UNDER_THE_OLD_NAME,
            {"SM70_MOE_GROUPED_DECODE": FlagValue(REQUIRE, "environment SM70_MOE_GROUPED_DECODE")},
        ),
        ({"SM70_MOE_STRICT": "1", "SM70_MOE_BANANA": "1"}, {}, NONE, {}),
        ({}, {"qpn_m1": "1"}, NONE, {"qpn_m1": FlagValue(REQUIRE, "argument")}),
        ({}, {"qpn_m1": "0"}, NONE, {}),
        ({}, {"qpn_m1": "1"}, UNDER_ITS_OWN, {}),
        (
            {QPN: "1"},
            {"qpn_m1": "1"},
            NONE,
            {QPN: FlagValue(REQUIRE, f"environment {QPN}"), "qpn_m1": FlagValue(REQUIRE, "argument")},
        ),
    ],
)
def test_which_flags_a_policy_does_not_have(
    environment: Mapping[str, str], arguments: Mapping[str, str], policy: Policy, found: Mapping[str, FlagValue]
) -> None:
    """A `1` cannot be met; a `0` has no effect on what goes by another name; other variables are no flags."""
    assert Settings.from_env(environment, flags=arguments).undeclared(policy) == found
