"""Ranks agree, fall back together or raise together; the same reports give the same verdict."""

from __future__ import annotations

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.decision import Outcome, Reason
from sm70_moe.facts import CallFacts
from sm70_moe.plan.agreement import RUN, lenient, reconcile, report, without
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
LAYER = "model.layers.0.mlp.experts"


def plan(flags: dict[str, str] | None = None, build: str = "fake", rank: int = 0, **changes: object) -> Plan:
    facts = contract_facts(FIRST, LAYER, tensor_rank=rank, **changes)
    return Plan(admit(FIRST, settings(flags), facts, fake_machine(build=build)))


def test_alike_ranks_agree() -> None:
    """Another rank number is no difference."""
    verdict = reconcile([report([plan(rank=rank)]) for rank in range(4)])
    assert (verdict.texts, dict(verdict.disputed), verdict.required) == ((), {}, ())


@pytest.mark.parametrize(
    ("other", "field", "disputed"),
    [
        (plan({"qpn_m1": "0"}), "flags.qpn_m1", ("qpn_m1",)),
        (plan(build="missing"), "build", ("grouped_decode", "indexed_prefill", "qpn_m1")),
        (plan(experts=256), "facts.experts", ("grouped_decode", "indexed_prefill", "qpn_m1")),
    ],
    ids=["flag", "build", "fact"],
)
def test_difference_names_rank_and_field(other: Plan, field: str, disputed: tuple[str, ...]) -> None:
    """The odd rank, the layer, the field and both values are named."""
    verdict = reconcile([report([plan()]), report([plan()]), report([other])])
    assert any(text.startswith(f"rank 2: {LAYER}: {field} is ") for text in verdict.texts)
    assert verdict.disputed[LAYER] == disputed


def test_missing_layer_is_a_difference() -> None:
    """A rank that has no plan for a layer disagrees with those that have one."""
    verdict = reconcile([report([plan()]), report([])])
    assert verdict.texts == (f"rank 1: {LAYER}: rank 1 has no plan for it, rank 0 has one",)


def test_falling_back_together_makes_them_equal() -> None:
    """Without the disputed routes a rank with and one without native kernels run the same."""
    ranks = [plan(), plan(build="missing")]
    verdict = reconcile([report([p]) for p in ranks])
    agreed = [without(p, verdict.disputed[LAYER]) for p in ranks]
    assert reconcile([report([p]) for p in agreed], RUN).texts == ()
    route = agreed[0].route(CallFacts.usual(1, 2560, 10))
    assert route is not None
    assert route.name == "legacy_single_token"
    decision = agreed[0].admission.decision("qpn_m1")
    assert (decision.outcome, decision.reasons) == (Outcome.FELL_BACK, (Reason.RANKS_DISAGREE,))


def test_other_geometry_stays_a_disagreement() -> None:
    """No falling back makes different layers equal."""
    ranks = [plan(), plan(experts=256)]
    verdict = reconcile([report([p]) for p in ranks])
    agreed = [without(p, verdict.disputed[LAYER]) for p in ranks]
    assert reconcile([report([p]) for p in agreed], RUN).texts


def test_required_is_never_taken_back() -> None:
    """A feature that one rank requires and another does not have is named as such."""
    verdict = reconcile([report([plan({"qpn_m1": "1"})]), report([plan(build="missing")])])
    assert verdict.required == (f"{LAYER}: qpn_m1 is required",)


def test_one_strict_policy_decides_for_all() -> None:
    """If any rank's policy raises, all raise."""
    strict = FIRST.model_copy(update={"on": FIRST.on.model_copy(update={"disagreement": "raise"})})
    other = Plan(admit(strict, settings(), contract_facts(FIRST, LAYER), fake_machine()))
    assert lenient([report([plan()]), report([plan()])])
    assert not lenient([report([plan()]), report([other])])
