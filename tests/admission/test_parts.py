"""Parts of a decision by themselves: exact findings, what is open in a layout, facts of a contract."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.admission.admit import Admission, admit, resident_tokens
from sm70_moe.admission.checks.layer import look_at
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.admission.negotiation import (
    Banks,
    candidates,
    decided,
    divisors,
    fault,
    groups,
    metadata_kinds,
    negotiate,
    unheld,
)
from sm70_moe.decision import Decision, Finding, Outcome, Reason
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.declared import capability
from sm70_moe.layout import BankLayout, Metadata
from sm70_moe.policy import Check, load_policies, load_policy, parse_policy
from sm70_moe.testing import fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
GENERIC = load_policy("generic-awq")


def first(flags: dict[str, str] | None = None, **changes: Any) -> Admission:
    return admit(FIRST, settings(flags), contract_facts(FIRST, **changes), fake_machine(), others=load_policies(None))


def passed(decision: Decision, check: str) -> Finding:
    (found,) = [finding for finding in decision.findings if finding.check == check]
    return found


@pytest.mark.parametrize(
    ("flags", "feature", "reason", "observed"),
    [
        ({}, "tune_small_shapes", Reason.FLAG_OFF_BY_DEFAULT, "off"),
        ({"tune_small_shapes": "0"}, "tune_small_shapes", Reason.FLAG_OFF, "0"),
        ({"qpn_m1": "0"}, "qpn_m1", Reason.FLAG_OFF, "0"),
    ],
)
def test_what_is_off_says_what_would_switch_it_on(
    flags: dict[str, str], feature: str, reason: Reason, observed: str
) -> None:
    """One finding and nothing else is looked at."""
    found = first(flags).decision(feature)
    assert found.findings == (Finding.failed("flag", reason, "auto or 1", observed),)
    assert (found.outcome, found.kind) == (Outcome.OFF, FIRST.features[feature].kind)
    assert (found.flag, found.flag_source == "unset") == ("off", not flags)


def test_a_need_says_what_became_of_it() -> None:
    """Admitted, or the other's outcome."""
    assert passed(first().decision("qpn_m1"), "needs batched_banks") == Finding.passed(
        "needs batched_banks", "admitted"
    )
    off = first({"batched_banks": "0"}).decision("qpn_m1")
    assert passed(off, "needs batched_banks") == Finding.failed(
        "needs batched_banks", Reason.NEED_NOT_ADMITTED, "admitted", "off"
    )
    chain = passed(off, "needs legacy_single_token")
    assert (chain.reason, chain.observed) == (Reason.NEED_NOT_ADMITTED, "fell back")


def test_nothing_steps_in_for_what_is_switched_off() -> None:
    """The other's flag, as a finding of its own; an explicit `1` asks for this one all the same."""
    off = first({"qpn_m1": "0"}).decision("native_decode")
    assert passed(off, "flag qpn_m1") == Finding.failed("flag qpn_m1", Reason.FLAG_OFF, "auto or 1", "0")
    asked = first({"qpn_m1": "0", "native_decode": "1"}).decision("native_decode")
    assert (asked.outcome, [f.check for f in asked.findings if f.check == "flag qpn_m1"]) == (Outcome.ADMITTED, [])


def test_a_last_resort_that_cannot_run_takes_everything_with_it() -> None:
    """Each feature that would be admitted says so, once."""
    admission = first(bits=8)
    assert admission.last_resort.outcome is Outcome.UNSUPPORTED
    assert admission.routes == ()
    batched = admission.decision("batched_banks")
    assert batched.outcome is Outcome.FELL_BACK
    assert Reason.BITS in batched.reasons


def test_an_option_of_a_route_that_does_not_run_does_nothing() -> None:
    """`indexed` honours it: admitted with that route, and not without it, under a check of its own."""
    check = "option of an admitted route"
    taken = first({"tune_small_shapes": "1"}).decision("tune_small_shapes")
    assert (taken.outcome, [f.check for f in taken.findings if f.check == check]) == (Outcome.ADMITTED, [])
    off = dict.fromkeys((r.feature or "" for r in FIRST.routes if r.backend == "indexed"), "0")
    idle = first({"tune_small_shapes": "1", **off}).decision("tune_small_shapes")
    assert passed(idle, "option").observed == "indexed"
    found = passed(idle, check)
    assert (found.reason, idle.outcome) == (Reason.OPTION_UNSUPPORTED, Outcome.REFUSED)
    assert "indexed" not in (found.observed or [])


def test_a_feature_that_is_declared_native_needs_a_gpu_whatever_its_backend() -> None:
    """A policy's word: the portable backend behind it would run anywhere."""
    text = Path(FIRST.origin).read_text()
    old = "[features.legacy_single_token]\n"
    assert text.count(old) == 1
    declared = parse_policy(text.replace(old, f"{old}native = true\n"))
    on_cpu = fake_machine(capability=None, build="missing")
    checks = {}
    for policy in (FIRST, declared):
        found = admit(policy, settings(), contract_facts(FIRST, device="cpu"), on_cpu)
        checks[policy] = {f.check for f in found.decision("legacy_single_token").findings}
    assert checks[declared] - checks[FIRST] == {"device", "native build", "native image", "self-test"}


def test_routes_and_features_keep_their_kind_on_a_layer_that_is_not_ours() -> None:
    """What records and tables are sorted by."""
    plain = first(format="none", packing=None, bits=None, zero_point=None, checkpoint_group=None)
    ours = first()
    assert [(d.feature, d.kind) for d in plain.decisions] == [(d.feature, d.kind) for d in ours.decisions]
    assert plain.last_resort.findings == tuple(f for f in plain.last_resort.findings if f.check != "backend")


def test_a_flag_of_other_policies_has_findings_for_what_differs() -> None:
    """The policy has no such flag; then the nearest policy's objections, in the words of its contract."""
    facts = contract_facts(FIRST, top_k=8)
    found = admit(GENERIC, settings({"qpn_m1": "1"}), facts, fake_machine(), others=load_policies(None))
    (decision,) = [one for one in found.decisions if one.feature == "qpn_m1"]
    first_finding, *misfits = decision.findings
    assert (first_finding.check, first_finding.reason, first_finding.observed) == (
        "flag",
        Reason.FLAG_UNDECLARED,
        "qpn_m1",
    )
    assert first_finding.expected == list(GENERIC.features)
    assert FIRST.name in first_finding.hint
    assert [(f.reason, f.expected, f.observed) for f in misfits] == [(Reason.TOP_K, 10, 8)]
    assert (decision.kind, decision.outcome, decision.flag) == ("flag", Outcome.REFUSED, "require")


def test_a_flag_of_no_policy_at_all() -> None:
    """Nobody has it: the policy's own flags are named."""
    found = admit(GENERIC, settings({"qpn_m1": "1"}), contract_facts(FIRST), fake_machine(), others=[GENERIC])
    (decision,) = [one for one in found.decisions if one.feature == "qpn_m1"]
    (finding,) = decision.findings
    assert (finding.reason, finding.expected, finding.observed) == (
        Reason.FLAG_UNDECLARED, list(GENERIC.features), "qpn_m1"
    )  # fmt: skip
    assert GENERIC.name in finding.hint


def test_objections_from_elsewhere_are_findings_and_are_kept() -> None:
    """Of other ranks, or of a proof: whoever decides the layer again has them."""
    given = {"qpn_m1": Finding.failed("other ranks", Reason.RANKS_DISAGREE, "admitted on every rank", [])}
    found = admit(FIRST, settings(), contract_facts(FIRST), fake_machine(), given)
    assert found.objections == given
    assert found.decision("qpn_m1").obstacles == (given["qpn_m1"],)
    assert first().objections == {}


def test_a_route_without_a_flag_falls_back_unless_it_is_the_last() -> None:
    """Only what the last resort lacks makes a layer unsupported."""
    text = Path(FIRST.origin).read_text()
    place = text.rindex("[[route]]")
    free = '[[route]]\nname = "free"\nbackend = "legacy"\norder = "octet32"\ntokens = { from = 5000 }\n\n'
    policy = parse_policy(text[:place] + free + text[place:])
    assert policy.routes[-1].name == "legacy"
    against = Finding.failed("elsewhere", Reason.PROOF_FAILED, 1, 2)
    outcomes = {}
    for name in ("free", "legacy"):
        found = admit(policy, settings(), contract_facts(FIRST), fake_machine(), {name: against})
        outcomes[name] = (found.decision(name).outcome, found.supported)
    assert outcomes == {"free": (Outcome.FELL_BACK, True), "legacy": (Outcome.UNSUPPORTED, False)}


# --- layouts


@pytest.mark.parametrize(
    ("could", "does", "found"),
    [
        ([], [], (False, True)),
        ([False], [], (False, True)),
        ([True, False], [], (False,)),
        ([True, False], [False], (False,)),
        ([True], [True], (True,)),
        ([True, True], [False, True], (True,)),
    ],
)
def test_a_property_is_decided_or_open(could: list[bool], does: list[bool], found: tuple[bool, ...]) -> None:
    """By the features that could decide it, and those that were admitted."""
    assert decided(could, does) == found


def test_kinds_of_metadata() -> None:
    """As the admitted feature says, four bytes without it, any kind where no feature says anything."""
    says, silent = FIRST.features["compact_metadata"], FIRST.features["batched_banks"]
    assert metadata_kinds([says, silent], [silent, says]) == (Metadata.THREE_BYTE,)
    assert metadata_kinds([says, silent], [silent]) == (Metadata.FOUR_BYTE,)
    assert metadata_kinds([silent], [silent]) == tuple(Metadata)
    assert next(iter(Metadata)) is Metadata.FOUR_BYTE


def test_groups_of_a_contract_are_those_that_an_admitted_feature_insists_on() -> None:
    """Else the widest that the layer has, and its divisors; none of a layer that cannot be cut."""
    layer = look_at(contract_facts(FIRST, intermediate=2048, checkpoint_group=128))
    insists, silent = FIRST.features["compact_metadata"], FIRST.features["batched_banks"]
    assert Check.PREPARED_GROUP in insists.checks
    assert Check.PREPARED_GROUP not in silent.checks
    assert groups(FIRST, layer, [silent, insists]) == (32,)
    assert groups(FIRST, layer, [silent]) == (128, 64, 32)
    assert groups(FIRST, layer, []) == (128, 64, 32)
    assert groups(GENERIC, layer, [insists]) == (128, 64, 32)
    assert groups(FIRST, look_at(contract_facts(FIRST, tensor_parallel=8)), [insists]) == ()


def test_groups_that_divide() -> None:
    """The widest first, none below 32, the widest itself among them."""
    assert divisors(128) == (128, 64, 32)
    assert divisors(96) == (96, 48, 32)
    assert divisors(33) == (33,)
    assert divisors(160) == (160, 80, 40, 32)


def banks(**changes: Any) -> Banks:
    usual: dict[str, Any] = {
        "hidden": 2560, "intermediate": 160, "orders": ("octet32",), "metadata": (Metadata.THREE_BYTE,),
        "groups": (32,), "interleaved": (True,), "batched": (True,),
    }  # fmt: skip
    assert set(usual) == {field.name for field in fields(Banks)}
    return Banks(**{**usual, **changes})


def test_candidates_in_the_preferred_order() -> None:
    """Orders first, then metadata, groups, columns, tensors; what does not hold the sizes is left out."""
    both = candidates(banks(metadata=(Metadata.FOUR_BYTE, Metadata.THREE_BYTE), interleaved=(False, True)))
    assert [layout.tag for layout in both] == [
        "octet32/4-byte/group-32/gate-up/batched",
        "octet32/4-byte/group-32/interleaved/batched",
        "octet32/3-byte/group-32/gate-up/batched",
        "octet32/3-byte/group-32/interleaved/batched",
    ]
    assert [
        one.order
        for one in candidates(banks(hidden=2880, intermediate=720, orders=("octet32", "tile32x8"), groups=(48,)))
    ] == ["tile32x8"]


def test_sizes_that_an_order_does_not_hold() -> None:
    """Named with the matrix; unknown sizes and orders of plug-ins are nobody's fault here."""
    layout = BankLayout("octet32", Metadata.THREE_BYTE, 32, True, True)
    assert fault(layout, banks()) is None
    assert str(fault(layout, banks(hidden=2570))).startswith("W13: ")
    assert str(fault(layout, banks(intermediate=176))).startswith("W2: ")
    for unknown in ({"hidden": None}, {"intermediate": None}):
        assert fault(layout, banks(**unknown)) is None
    assert fault(BankLayout("plugin", Metadata.THREE_BYTE, 32, True, True), banks(hidden=7)) is None
    found = unheld(banks(intermediate=176))
    assert (found.check, found.reason, found.expected) == ("bank order", Reason.BANK_SIZES, "sizes that octet32 holds")
    assert str(found.observed).startswith("W2: ")
    assert found.observed == fault(candidates(banks())[0], banks(intermediate=176))


def test_the_last_route_is_asked_first_and_the_rest_in_order() -> None:
    """What the last one does not read is no layout for any; a route that reads none of the rest is a misfit."""
    abilities = {route.backend: capability(route.backend, "sm_70") for route in FIRST.routes}
    open_banks = banks(interleaved=(False, True))
    found = negotiate(open_banks, FIRST.routes, abilities)
    assert found.layout is not None
    assert (found.layout.interleaved, found.misfits) == (True, ())
    gate_up = negotiate(banks(interleaved=(False,)), FIRST.routes, abilities)
    assert gate_up.layout is not None
    assert not gate_up.layout.interleaved
    assert {name for name, _ in gate_up.misfits} == {
        route.feature for route in FIRST.routes if route.backend not in ("legacy",)
    }
    assert all(finding.reason is Reason.LAYOUT_UNREADABLE for _, found in gate_up.misfits for finding in found)
    assert negotiate(open_banks, (), abilities).layout is None
    assert negotiate(banks(groups=()), FIRST.routes, abilities).layout is None
    nothing = negotiate(banks(intermediate=176), FIRST.routes, abilities)
    assert (nothing.layout, [name for name, _ in nothing.misfits]) == (None, ["legacy"])


def test_a_backend_that_says_nothing_limits_nothing() -> None:
    """It may not be there at all: that is another check's matter."""
    found = negotiate(banks(), FIRST.routes, {})
    assert (found.layout is not None, found.misfits) == (True, ())


# --- facts


def test_facts_of_a_contract_and_what_it_leaves_open() -> None:
    """The rank's intermediate size times the ranks; sizes that a contract does not have are unknown."""
    facts = contract_facts(FIRST)
    assert (facts.layer, facts.index, facts.intermediate, facts.tensor_parallel) == (
        "model.layers.0.mlp.experts", 0, 640, 4
    )  # fmt: skip
    assert (facts.format, facts.packing, facts.bits, facts.zero_point) == ("awq", "gemm", 4, True)
    assert (facts.gated, facts.bias, facts.router_weight_on_input) == (True, False, False)
    assert (facts.tensor_rank, facts.expert_parallel, facts.expert_rank) == (0, 1, 0)
    assert (facts.device, facts.max_sequences, facts.speculative_width) == ("cuda:0", 8, 1)
    unknown = contract_facts(GENERIC)
    assert (unknown.hidden, unknown.intermediate, unknown.experts, unknown.tensor_parallel) == (None, None, None, 1)
    assert contract_facts(FIRST, "x", top_k=3).top_k == 3
    assert contract_facts(FIRST, "x").layer == "x"


@pytest.mark.parametrize(
    ("override", "sequences", "width", "tokens"),
    [(0, 8, 1, 8), (0, 8, 3, 24), (0, 64, 1, 32), (5, 8, 1, 5), (0, None, None, 32), (0, 4, None, 4), (32, 1, 1, 32)],
)
def test_resident_tokens(override: int, sequences: int | None, width: int | None, tokens: int) -> None:
    """What the engine will send, at most 32; an override goes before it."""
    facts = LayerFacts(layer="x", max_sequences=sequences, speculative_width=width)
    assert resident_tokens(override, facts) == tokens
