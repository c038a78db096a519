"""A layer that the native decode kernels take has native routes for every number of tokens."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.admission.admit import admit
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.facts import CallFacts, LayerFacts
from sm70_moe.kernels.capability import Capability
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy, shipped_policies
from sm70_moe.testing import fake_machine, settings

MODELS = Path(__file__).parents[1] / "data" / "models.csv"
MACHINE = fake_machine()
NATIVE = frozenset({"decode", "qpn", "grouped", "indexed"})
TOKENS = (1, 2, 8, 9, 16, 127, 128, 1000, 6553, 6554, 8192, 100_000)
POLICIES = shipped_policies()
FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def routes(plan: Plan, facts: LayerFacts) -> dict[int, str]:
    """Token count -> backend of the route that a usual call takes; each backend says that it takes such a call."""
    found = {}
    for tokens in TOKENS:
        call = CallFacts.usual(tokens, facts.hidden or 0, facts.top_k or 0)
        route = plan.route(call)
        assert route is not None
        ability = route.ability
        assert isinstance(ability, Capability)
        assert ability.takes(call)
        assert plan.layout is not None
        assert ability.reads.takes(plan.layout)
        found[tokens] = route.backend
    return found


def judge(facts: LayerFacts, **given: str) -> bool:
    """Whether native kernels decode the layer; all of its calls are native then. False where nothing runs it."""
    for policy in POLICIES:
        plan = Plan(admit(policy, settings(**given), facts, MACHINE))
        if plan.supported and any(route.backend in NATIVE for route in plan.reachable(8)):
            assert set(routes(plan, facts).values()) <= NATIVE, policy.name
    generic = Plan(admit(load_policy("generic-awq"), settings(**given), facts, MACHINE))
    return generic.supported and routes(generic, facts)[8] in NATIVE


def of_model(row: dict[str, str]) -> LayerFacts:
    """A rank's layer of a public model."""
    return replace(
        contract_facts(FIRST),
        hidden=int(row["H"]),
        intermediate=int(row["I"]),
        experts=int(row["E"]),
        top_k=int(row["k"]),
        tensor_parallel=int(row["tp"]),
        checkpoint_group=int(row["g"]),
    )


def test_no_public_model_that_is_decoded_natively_falls_back() -> None:
    """Every row of the list that is not refused, under every shipped policy: all are decoded natively."""
    with MODELS.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["plan"] not in ("na", "none")]
    assert len(rows) == 214
    assert all(judge(of_model(row)) for row in rows)


@given(
    hidden=st.integers(1, 512).map(lambda n: 32 * n),
    intermediate=st.integers(1, 256).map(lambda n: 32 * n),
    experts=st.integers(1, 1024),
    top_k=st.integers(1, 16),
    group=st.sampled_from((32, 64, 128)),
)
def test_no_layer_that_is_decoded_natively_falls_back(
    hidden: int, intermediate: int, experts: int, top_k: int, group: int
) -> None:
    """Any sizes of up to 1,024 experts, which is as many as the plan of a batch has threads for."""
    facts = replace(
        contract_facts(FIRST),
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=min(top_k, experts),
        tensor_parallel=1,
        checkpoint_group=group,
    )
    judge(facts)


@pytest.mark.parametrize(("flag", "first", "last"), [("grouped_batch", 9, 127), ("native_prefill", 128, 8192)])
def test_a_flag_at_0_brings_the_older_route_back(flag: str, first: int, last: int) -> None:
    """For the tokens of that route, and no others."""
    facts = contract_facts(FIRST, hidden=2048)
    flags = {flag: "0"}
    plan = Plan(admit(load_policy("generic-awq"), settings(flags), facts, MACHINE))
    for tokens in (8, 9, 127, 128, 8192):
        found = plan.route(CallFacts.usual(tokens, 2048, 10))
        assert found is not None
        assert (found.backend == "legacy") is (first <= tokens <= last)
