"""Ranks agree, fall back together or raise together; the same reports give the same verdict."""

from __future__ import annotations

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.decision import Outcome, Reason, obstacle_text
from sm70_moe.facts import CallFacts
from sm70_moe.plan.agreement import RUN, Lack, Verdict, disagreement, fallen_back, lenient, reconcile, report
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.settings.settings import Settings
from sm70_moe.testing import contract_facts, fake_build, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
LAYER = "model.layers.0.mlp.experts"


def plan(flags: dict[str, str] | None = None, build: str = "fake", rank: int = 0, **changes: object) -> Plan:
    facts = contract_facts(FIRST, LAYER, tensor_rank=rank, **changes)
    return Plan(admit(FIRST, settings(flags), facts, fake_machine(build=build)))


def test_alike_ranks_agree() -> None:
    """Another rank number is no difference."""
    verdict = reconcile([report([plan(rank=rank)]) for rank in range(4)])
    assert verdict == Verdict((), (), ())


NATIVE = {"grouped_batch", "grouped_decode", "indexed_prefill", "native_decode", "native_prefill", "qpn_m1"}


@pytest.mark.parametrize(
    ("other", "field", "disputed"),
    [
        (plan({"qpn_m1": "0"}), "flags.qpn_m1", ("native_decode", "qpn_m1")),
        (plan(build="missing"), "build", tuple(sorted(NATIVE))),
        (plan(experts=256), "facts.experts", ("grouped_decode", "indexed_prefill", "qpn_m1")),
    ],
    ids=["flag", "build", "fact"],
)
def test_difference_names_rank_and_field(other: Plan, field: str, disputed: tuple[str, ...]) -> None:
    """The odd rank, the layer, the field and both values are named."""
    verdict = reconcile([report([plan()]), report([plan()]), report([other])])
    assert any(text.startswith(f"rank 2: {LAYER}: {field} is ") for text in verdict.texts)
    assert verdict.disputed == {LAYER: disputed}


def test_missing_layer_is_a_difference() -> None:
    """A rank that has no plan for a layer disagrees with those that have one."""
    verdict = reconcile([report([plan()]), report([])])
    assert verdict.texts == (f"rank 1: {LAYER}: plan is 'missing', 'made' on rank 0",)
    assert {lack.rank for lack in verdict.lacks} == {1}


def test_a_layer_that_only_rank_0_lacks() -> None:
    """The other way round; and what a rank without a plan is said to lack it for."""
    verdict = reconcile([report([]), report([plan({"qpn_m1": "1"})])])
    assert verdict.texts == (f"rank 1: {LAYER}: plan is 'made', 'missing' on rank 0",)
    assert f"{LAYER}: qpn_m1 is required on rank 1, not admitted on rank 0 (no plan)" in verdict.required


def test_the_error_names_what_is_required_and_then_each_rank() -> None:
    """One sentence a group of ranks and layers; of many fields the first ones, and how many more."""
    verdict = reconcile([report([plan()]), report([plan({"qpn_m1": "1"})]), report([plan(build="missing")])])
    texts = str(disagreement(verdict)).removeprefix("ranks hold different plans: ").split("; ")
    assert texts[0] == f"{LAYER}: qpn_m1 is required on rank 1, not admitted on rank 2 (BUILD_MISSING)"
    assert texts[1] == f"rank 1: {LAYER}: flags.qpn_m1 is 'require', 'auto' on rank 0"
    assert texts[2].startswith(f"rank 2: {LAYER}: build is None, 'fake-build' on rank 0, ")
    assert texts[2].endswith(" more fields")
    assert len(texts) == 3


def fall_back(ranks: list[Plan]) -> list[Plan]:
    """What each rank ends with."""
    verdict = reconcile([report([p]) for p in ranks])
    return [fallen_back([p], verdict, lambda lack, rank=rank: lack.rank != rank)[0] for rank, p in enumerate(ranks)]


def test_falling_back_together_makes_them_equal() -> None:
    """Without the disputed routes a rank with and one without native kernels run the same."""
    agreed = fall_back([plan(), plan(build="missing")])
    assert reconcile([report([p]) for p in agreed], RUN).texts == ()
    route = agreed[0].route(CallFacts.usual(1, 2560, 10))
    assert route is not None
    assert route.name == "legacy_single_token"
    decision = agreed[0].admission.decision("qpn_m1")
    assert (decision.outcome, decision.reasons) == (Outcome.FELL_BACK, (Reason.RANKS_DISAGREE,))


def test_a_fallback_says_which_rank_and_why() -> None:
    """The finding holds rank, layer, feature and that rank's reasons, as plain values; only on the other ranks."""
    with_it, also, lacking, off = fall_back([plan(), plan(), plan(build="missing"), plan({"qpn_m1": "0"})])
    (finding,) = [f for f in with_it.admission.decision("qpn_m1").obstacles if f.check == "other ranks"]
    assert finding.expected == "admitted on every rank"
    assert finding.observed == [
        {
            "rank": 2,
            "layer": LAYER,
            "feature": "qpn_m1",
            "reasons": ["BUILD_MISSING"],
            "text": "native build: expected a native build, found none; this installation has no native kernels",
        },
        {
            "rank": 3,
            "layer": LAYER,
            "feature": "qpn_m1",
            "reasons": ["FLAG_OFF"],
            "text": "flag: expected auto or 1, found 0",
        },
    ]
    assert "rank 2" in obstacle_text(finding)
    assert also.admission.decision("qpn_m1").obstacles == (finding,)
    (own,) = [f for f in lacking.admission.decision("qpn_m1").obstacles if f.check == "other ranks"]
    assert [lack["rank"] for lack in own.observed] == [3]
    assert lacking.admission.decision("grouped_decode").reasons == (Reason.BUILD_MISSING,)
    assert off.admission.decision("qpn_m1").reasons == (Reason.FLAG_OFF,)


def test_other_geometry_stays_a_disagreement() -> None:
    """No falling back makes different layers equal."""
    assert reconcile([report([p]) for p in fall_back([plan(), plan(experts=256)])], RUN).texts


def test_required_is_never_taken_back() -> None:
    """A feature that one rank requires and another does not have is named with both ranks and the reason."""
    verdict = reconcile([report([plan({"qpn_m1": "1"})]), report([plan(build="missing")])])
    assert verdict.required == (f"{LAYER}: qpn_m1 is required on rank 0, not admitted on rank 1 (BUILD_MISSING)",)
    assert verdict.lacks[-1] == Lack(
        1,
        LAYER,
        "qpn_m1",
        ("BUILD_MISSING",),
        "native build: expected a native build, found none; this installation has no native kernels",
    )


def test_alike_layers_and_ranks_are_one_difference() -> None:
    """48 layers and two odd ranks: each field once, causes first."""
    layers = [f"model.layers.{i}.mlp.experts" for i in range(48)]

    def plans(flags: dict[str, str]) -> list[Plan]:
        made = (contract_facts(FIRST, name, index=i) for i, name in enumerate(layers))
        return [Plan(admit(FIRST, settings(flags), facts, fake_machine())) for facts in made]

    usual, odd = report(plans({})), report(plans({"qpn_m1": "0"}))
    verdict = reconcile([usual, odd, usual, odd])
    assert [(o.ranks, len(o.layers), o.difference.field) for o in verdict.odds] == [
        ((1, 3), 48, "flags.qpn_m1"),
        ((1, 3), 48, "outcomes.native_decode"),
        ((1, 3), 48, "outcomes.qpn_m1"),
        ((1, 3), 48, "routes"),
    ]
    assert verdict.texts[0] == (f"ranks 1, 3: {LAYER} and 47 more layers: flags.qpn_m1 is 'off', 'auto' on rank 0")


@pytest.mark.parametrize(
    ("capability", "variables", "field"),
    [((7, 0), {"SM70_MOE_PERSISTENT_MAX_TOKENS": "4"}, "resident_tokens"), ((7, 5), {}, "architecture")],
)
def test_what_alters_a_run_stays_a_disagreement_after_falling_back(
    capability: tuple[int, int], variables: dict[str, str], field: str
) -> None:
    """Ranks that run other scratch or other machine code do not run alike, whatever they took back."""
    build = fake_build(images=frozenset({"sm_70", "sm_75"}))
    anywhere = FIRST.model_copy(update={"contract": FIRST.contract.model_copy(update={"architectures": None})})

    def one(capability: tuple[int, int], operator: Settings) -> Plan:
        return Plan(admit(anywhere, operator, contract_facts(anywhere, LAYER), fake_machine(capability, build)))

    ranks = [one((7, 0), settings({"qpn_m1": "0"})), one(capability, settings(**variables))]
    left = reconcile([report([p]) for p in fall_back(ranks)], RUN)
    assert {odd.difference.field for odd in left.odds} == {field}


def test_expert_parallel_ranks_run_alike() -> None:
    """Which share of the experts a rank has is no difference: equal digests, no disagreement."""
    ranks = [plan(expert_parallel=4, expert_rank=rank) for rank in range(4)]
    assert len({p.digest for p in ranks}) == 1
    assert reconcile([report([p]) for p in ranks]) == Verdict((), (), ())


def test_one_strict_policy_decides_for_all() -> None:
    """If any rank's policy raises, all raise."""
    strict = FIRST.model_copy(update={"on": FIRST.on.model_copy(update={"disagreement": "raise"})})
    other = Plan(admit(strict, settings(), contract_facts(FIRST, LAYER), fake_machine()))
    assert lenient([report([plan()]), report([plan()])])
    assert not lenient([report([plan()]), report([other])])
