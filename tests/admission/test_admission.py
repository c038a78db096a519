"""Admission beyond the truth table: prerequisites, needs, lists, layouts, mixed models, plug-ins."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sm70_moe.admission.admit import Admission, admit, resident_tokens
from sm70_moe.decision import Decision, Finding, Outcome, Reason, Status
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.capability import Capability, Reads, Span
from sm70_moe.kernels.protocol import Broken
from sm70_moe.layout import Metadata
from sm70_moe.machine.build import Build
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import Policy, choose_policy, load_policy, shipped_policies
from sm70_moe.settings.flags import FlagState
from sm70_moe.testing import contract_facts, fake_build, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
GENERIC = load_policy("generic-awq")


def first(flags: dict[str, str] | None = None, machine: Machine | None = None, **changes: Any) -> Admission:
    return admit(FIRST, settings(flags), contract_facts(FIRST, **changes), machine or fake_machine())


def statuses(admission: Admission, feature: str) -> dict[str, Status]:
    return {f.check: f.status for f in admission.decision(feature).findings}


def test_full_contract_admits_everything_but_options() -> None:
    """On a machine that has it all, every route is admitted; options stay off unless they are asked for."""
    admission = first()
    outcomes = {d.feature: d.outcome for d in admission.decisions}
    assert outcomes.pop("tune_small_shapes") is Outcome.OFF
    assert outcomes.pop("fused_decode") is Outcome.OFF
    assert set(outcomes.values()) == {Outcome.ADMITTED}
    assert [r.name for r in admission.routes] == [r.name for r in FIRST.routes]
    assert admission.layout is not None
    assert admission.layout.tag == "octet32/3-byte/group-32/interleaved/batched"


def test_refusal_lists_every_failure() -> None:
    """Three things wrong at once are three reasons, whatever their order."""
    admission = first({"qpn_m1": "1"}, fake_machine(build="missing"), experts=256, checkpoint_group=64)
    assert admission.decision("qpn_m1").outcome is Outcome.REFUSED
    assert set(admission.decision("qpn_m1").reasons) == {Reason.EXPERTS, Reason.GROUP_SIZE, Reason.BUILD_MISSING}


def test_checks_without_their_prerequisite_are_skipped() -> None:
    """Without a build there is no image to look at and nothing to test: skipped, not failed."""
    found = statuses(first(machine=fake_machine(build="missing")), "qpn_m1")
    assert found["native build"] is Status.FAIL
    assert (found["native image"], found["self-test"]) == (Status.SKIPPED, Status.SKIPPED)


def test_unquantised_layer_skips_what_quantisation_has() -> None:
    """An unquantised layer fails on its format; bits and groups are skipped, not blamed."""
    admission = first(format="none", packing=None, bits=None, zero_point=None, checkpoint_group=None)
    found = statuses(admission, "qpn_m1")
    assert found["format"] is Status.FAIL
    assert {found[name] for name in ("bits", "zero point", "checkpoint group", "prepared group")} == {Status.SKIPPED}
    assert {decision.outcome for decision in admission.decisions} == {Outcome.NOT_OURS, Outcome.OFF}
    assert (admission.supported, admission.foreign, admission.routes) == (False, True, ())


@pytest.mark.parametrize("flag", ["auto", "1", "0"])
def test_no_flag_speaks_about_a_layer_that_is_not_quantised(flag: str) -> None:
    """A `1` is about quantised layers: another one is not ours, and no reason to refuse a model."""
    plain = {"format": "none", "packing": None, "bits": None, "zero_point": None, "checkpoint_group": None}
    given = settings() if flag == "auto" else settings({"qpn_m1": flag})
    admission = admit(FIRST, given, contract_facts(FIRST, **plain), fake_machine())
    assert admission.decision("qpn_m1").outcome is (Outcome.OFF if flag == "0" else Outcome.NOT_OURS)
    assert admission.refused == ()


@pytest.mark.parametrize(
    ("result", "status", "reason"),
    [
        ("", Status.PASS, None),
        ("W2 is 3.0, known answer 2.0", Status.FAIL, Reason.SELF_TEST_FAILED),
        (None, Status.UNKNOWN, Reason.FACT_UNKNOWN),
    ],
)
def test_self_test_has_three_answers(result: str | None, status: Status, reason: Reason | None) -> None:
    """Right, wrong and never run are three things; only right admits."""
    tests = {} if result is None else {("cuda:0", "qpn"): result}
    build = Build("fake-build", "fake-build", frozenset({"sm_70"}), tests)
    decision = first(machine=fake_machine(build=build)).decision("qpn_m1")
    finding = next(f for f in decision.findings if f.check == "self-test")
    assert (finding.status, finding.reason) == (status, reason)
    assert decision.admitted is (status is Status.PASS)


def test_device_is_the_layers_own() -> None:
    """A layer on the second device is judged by that device's architecture and its own self-test."""
    one, other = fake_machine((7, 0)).devices[0], fake_machine((8, 0)).devices[0]
    machine = replace(fake_machine(), devices=(one, replace(other, name="cuda:1")))
    assert first(machine=machine, device="cuda:0").decision("qpn_m1").admitted
    reasons = first(machine=machine, device="cuda:1").decision("qpn_m1").reasons
    assert reasons == (Reason.ARCHITECTURE, Reason.ARCH_MISSING)
    assert Reason.DEVICE in first(machine=machine, device="cuda:7").decision("qpn_m1").reasons


def test_needs_carry_over() -> None:
    """QPN needs the interleaved bank: with the older single-token route off it falls back and says so."""
    decision = first({"legacy_single_token": "0"}).decision("qpn_m1")
    assert decision.outcome is Outcome.FELL_BACK
    assert decision.reasons == (Reason.NEED_NOT_ADMITTED,)
    refused = first({"legacy_single_token": "0", "qpn_m1": "1"})
    assert [d.feature for d in refused.refused] == ["qpn_m1"]


def test_w13_is_interleaved_only_with_the_single_token_route() -> None:
    """The admission of the older single-token route is what interleaves W13."""
    on, off = first().layout, first({"legacy_single_token": "0"}).layout
    assert on is not None
    assert off is not None
    assert (on.interleaved, off.interleaved) == (True, False)


def test_metadata_layout_follows_its_flag() -> None:
    """Compact metadata are 3 bytes where admitted, 4 where not."""
    compact, wide = first().layout, first({"compact_metadata": "0"}).layout
    assert compact is not None
    assert wide is not None
    assert (compact.metadata, wide.metadata) == (Metadata.THREE_BYTE, Metadata.FOUR_BYTE)


def test_a_policy_may_want_less_metadata() -> None:
    """A layout feature with 2.5 bytes gives banks with 2.5 bytes."""
    least = FIRST.features["compact_metadata"].model_copy(update={"metadata": "2.5-byte"})
    policy = FIRST.model_copy(update={"features": {**FIRST.features, "compact_metadata": least}})
    layout = admit(policy, settings(), contract_facts(FIRST), fake_machine()).layout
    assert layout is not None
    assert layout.metadata is Metadata.TWO_AND_HALF_BYTE


def test_regrouped_checkpoint_takes_grouped_but_not_qpn() -> None:
    """A group-128 checkpoint re-grouped to 32 qualifies for grouped decode; QPN wants native groups."""
    admission = first(checkpoint_group=128)
    assert admission.decision("grouped_decode").admitted
    assert admission.decision("qpn_m1").reasons == (Reason.GROUP_SIZE,)
    assert admission.decision("indexed_prefill").reasons == (Reason.GROUP_SIZE,)
    assert admission.layout is not None
    assert admission.layout.group == 32


@pytest.mark.parametrize(
    ("variables", "index", "reason"),
    [
        ({"SM70_MOE_LAYER_DENYLIST": "0-2,5"}, 5, Reason.LAYER_DENIED),
        ({"SM70_MOE_LAYER_DENYLIST": "0-2,5"}, 4, None),
        ({"SM70_MOE_LAYER_ALLOWLIST": "0-2"}, 3, Reason.LAYER_NOT_ALLOWED),
        ({"SM70_MOE_LAYER_ALLOWLIST": "0-2"}, 2, None),
        ({"SM70_MOE_LAYER_ALLOWLIST": "0-2"}, None, Reason.FACT_UNKNOWN),
    ],
)
def test_layer_lists_decide_over_batched_banks(
    variables: dict[str, str], index: int | None, reason: Reason | None
) -> None:
    """A layer outside of the lists has no batched banks, hence none of the routes that need them."""
    admission = admit(FIRST, settings(**variables), contract_facts(FIRST, index=index), fake_machine())
    batched = admission.decision("batched_banks")
    assert batched.reasons == (() if reason is None else (reason,))
    assert admission.decision("qpn_m1").admitted is (reason is None)
    assert admission.decision("legacy").admitted


def test_list_and_require_contradict() -> None:
    """A required route on a denied layer is refused: an explicit 1 is never dropped in silence."""
    operator = settings({"qpn_m1": "1"}, SM70_MOE_LAYER_DENYLIST="0")
    assert [d.feature for d in admit(FIRST, operator, contract_facts(FIRST), fake_machine()).refused] == ["qpn_m1"]


@pytest.mark.parametrize(
    ("changes", "machine", "outcome"),
    [
        ({"bits": 8}, fake_machine(), Outcome.FELL_BACK),
        ({"checkpoint_group": 128}, fake_machine(), Outcome.FELL_BACK),
        ({}, fake_machine(build="missing"), Outcome.REFUSED),
        ({"bits": 8}, fake_machine(build="missing"), Outcome.REFUSED),
        ({"experts": None}, fake_machine(), Outcome.REFUSED),
    ],
)
def test_admit_the_rest_tolerates_odd_layers_only(changes: dict[str, Any], machine: Machine, outcome: Outcome) -> None:
    """With admit-the-rest an odd layer falls back under 1; a machine that lacks something still refuses."""
    lenient = FIRST.model_copy(update={"on": FIRST.on.model_copy(update={"mixed_model": "admit-the-rest"})})
    admission = admit(lenient, settings({"qpn_m1": "1"}), contract_facts(FIRST, **changes), machine)
    assert admission.decision("qpn_m1").outcome is outcome


def test_admit_the_rest_does_not_excuse_a_flag() -> None:
    """A need that the operator switched off is a contradiction, not an odd layer."""
    lenient = FIRST.model_copy(update={"on": FIRST.on.model_copy(update={"mixed_model": "admit-the-rest"})})
    operator = settings({"qpn_m1": "1", "batched_banks": "0"})
    decision = admit(lenient, operator, contract_facts(FIRST), fake_machine()).decision("qpn_m1")
    assert decision.outcome is Outcome.REFUSED


def test_option_without_a_backend_that_has_it() -> None:
    """Asking for tuning where no admitted route can be tuned fails closed."""
    admitted = first({"tune_small_shapes": "1"}).decision("tune_small_shapes")
    assert admitted.outcome is Outcome.ADMITTED
    machine = fake_machine(build="missing")
    decision = first({"tune_small_shapes": "1"}, machine=machine).decision("tune_small_shapes")
    assert (decision.outcome, decision.reasons) == (Outcome.REFUSED, (Reason.OPTION_UNSUPPORTED,))


def test_missing_and_broken_backends_are_findings() -> None:
    """A plug-in that is absent or does not load makes its route fall back with its own reason."""
    whole = fake_machine()
    without = replace(whole, backends={k: v for k, v in whole.backends.items() if k != "qpn"})
    broken = replace(whole, backends={**whole.backends, "qpn": Broken("qpn", "undefined symbol: _Z3foo")})
    assert first(machine=without).decision("qpn_m1").reasons == (Reason.BACKEND_MISSING,)
    assert first(machine=broken).decision("qpn_m1").reasons == (Reason.BACKEND_BROKEN,)


class Objector:
    """A plug-in whose own check breaks, fails, or whose banks are others."""

    name, native, options = "qpn", True, frozenset[str]()

    def __init__(self, orders: frozenset[str], answer: tuple[Finding, ...] | None) -> None:
        self.orders, self.answer = orders, answer

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        if self.answer is None:
            raise ZeroDivisionError("no lanes")
        return self.answer

    def can(self, architecture: str | None) -> Capability:
        return Capability(Span(1), Reads(self.orders), frozenset({"float16"}))

    def workspace(self, *_: object) -> int:
        return 0

    prepare = run = workspace


@pytest.mark.parametrize(
    ("backend", "reason", "status"),
    [
        (Objector(frozenset({"octet32"}), None), Reason.CHECK_BROKE, Status.ERROR),
        (Objector(frozenset({"other"}), ()), Reason.LAYOUT_UNREADABLE, Status.FAIL),
        (
            Objector(frozenset({"octet32"}), (Finding.failed("lanes", Reason.HIDDEN, 64, 2560),)),
            Reason.HIDDEN,
            Status.FAIL,
        ),
    ],
)
def test_a_plug_ins_own_objections(backend: Any, reason: Reason, status: Status) -> None:
    """What a backend objects to is a finding; a check that raises is an error, and both fall back."""
    machine = fake_machine()
    backends = MappingProxyType({**machine.backends, "qpn": backend})
    decision = first(machine=replace(machine, backends=backends)).decision("qpn_m1")
    assert decision.outcome is Outcome.FELL_BACK
    assert [(f.reason, f.status) for f in decision.obstacles] == [(reason, status)]


def test_zero_does_not_look_at_anything() -> None:
    """A flag at 0 has one finding, the flag itself, with the name that set it."""
    operator = settings(VLLM_SM70_AWQ_QWEN38_QPN_M1="0")
    decision = admit(FIRST, operator, contract_facts(FIRST), fake_machine()).decision("qpn_m1")
    assert [f.reason for f in decision.findings] == [Reason.FLAG_OFF]
    assert decision.flag_source == "environment VLLM_SM70_AWQ_QWEN38_QPN_M1"


def test_explicit_one_differs_from_the_default() -> None:
    """Both lead to the same route, but the record tells them apart."""
    required, unset = first({"qpn_m1": "1"}), first()
    assert (required.decision("qpn_m1").flag, required.decision("qpn_m1").flag_source) == ("require", "argument")
    assert (unset.decision("qpn_m1").flag, unset.decision("qpn_m1").flag_source) == ("auto", "unset")
    assert required.flags["qpn_m1"].state is FlagState.REQUIRE


@pytest.mark.parametrize(
    ("override", "sequences", "width", "tokens"),
    [
        (0, 8, 1, 8),
        (0, 8, 3, 24),
        (0, 64, 1, 32),
        (16, 64, 1, 16),
        (99, 1, 1, 32),
        (0, None, None, 32),
        (0, 4, None, 4),
    ],
)
def test_resident_tokens(override: int, sequences: int | None, width: int | None, tokens: int) -> None:
    """min(32, override or sequences * width); the cap where the engine did not say."""
    facts = LayerFacts(layer="l", max_sequences=sequences, speculative_width=width)
    assert resident_tokens(override, facts) == tokens


@pytest.mark.parametrize(
    ("policy", "flags", "variables", "named"),
    [
        ("generic-awq", {}, {"SM70_MOE_QPN_M1": "1"}, "SM70_MOE_QPN_M1"),
        ("qwen3-30b-a3b-awq-tp4", {"qpn_m1": "1"}, {}, "qpn_m1"),
        ("qwen3-next-80b-a3b-awq-tp4", {}, {"VLLM_SM70_AWQ_QWEN38_QPN_M1": "1"}, "VLLM_SM70_AWQ_QWEN38_QPN_M1"),
    ],
)
def test_a_flag_that_the_policy_does_not_have_fails_closed(
    policy: str, flags: dict[str, str], variables: dict[str, str], named: str
) -> None:
    """An explicit 1 that no feature of the layer's policy answers to is refused, not dropped."""
    facts = contract_facts(FIRST)
    admission = admit(load_policy(policy), settings(flags, **variables), facts, fake_machine())
    (decision,) = admission.refused
    assert (decision.feature, decision.kind) == (named, "flag")
    assert decision.reasons == (Reason.FLAG_UNDECLARED,)


@pytest.mark.parametrize("value", ["0", None])
def test_an_undeclared_flag_at_0_is_met_already(value: str | None) -> None:
    """Switching off what a policy does not have changes nothing."""
    variables = {} if value is None else {"SM70_MOE_QPN_M1": value}
    admission = admit(GENERIC, settings(**variables), contract_facts(FIRST), fake_machine())
    assert admission.refused == ()


MODELS = list(csv.DictReader((Path(__file__).parents[1] / "data" / "models.csv").read_text().splitlines()))


@pytest.mark.parametrize("row", MODELS, ids=lambda r: f"{r['name']}-g{r['g']}-tp{r['tp']}")
def test_every_model_is_answered(row: dict[str, str]) -> None:
    """Each row of models.csv gets a plan with the group of the table, or a refusal with its numbers."""
    facts = LayerFacts(
        layer="model.layers.0.mlp.experts",
        index=0,
        hidden=int(row["H"]),
        intermediate=int(row["I"]),
        experts=int(row["E"]),
        top_k=int(row["k"]),
        format="awq",
        packing="gemm",
        bits=4,
        zero_point=True,
        checkpoint_group=int(row["g"]),
        activation="silu",
        gated=True,
        bias=False,
        router_weight_on_input=False,
        activations="float16",
        tensor_parallel=int(row["tp"]),
        tensor_rank=0,
        expert_parallel=1,
        expert_rank=0,
        device="cuda:0",
    )
    admission = admit(choose_policy(shipped_policies(), facts), settings(), facts, fake_machine(build="missing"))
    legacy = admission.decision("legacy")
    if row["plan"] in ("na", "none"):
        assert legacy.outcome is Outcome.UNSUPPORTED
        assert legacy.reasons in ((Reason.GROUP_INDIVISIBLE,), (Reason.SHARD_CUTS_GROUP,))
        return
    assert legacy.admitted
    assert admission.layout is not None
    widest = int(row["g"]) if row["plan"] == "native" else int(row["plan"].removeprefix("prepare"))
    wanted = admission.policy.contract.weights.prepared_group
    assert admission.layout.group == widest or (admission.layout.group == wanted and widest % wanted == 0)


@pytest.mark.parametrize("policy", [p for p in shipped_policies() if not p.contract.any_geometry], ids=lambda p: p.name)
def test_every_shipped_contract_can_be_met(policy: Policy) -> None:
    """A layer just as a contract has it is admitted by every native route of its policy."""
    images = fake_build(images=frozenset(policy.contract.architectures or ()))
    admission = admit(policy, settings(), contract_facts(policy), fake_machine(build=images))
    native = [name for name, feature in policy.features.items() if feature.native and feature.kind == "route"]
    assert native
    assert all(admission.decision(name).admitted for name in native)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_rank": None}, Reason.FACT_UNKNOWN),
        ({"tensor_rank": 4}, Reason.RANK),
        ({"tensor_rank": -1}, Reason.RANK),
        ({"expert_parallel": 2, "expert_rank": None}, Reason.FACT_UNKNOWN),
        ({"expert_parallel": 2, "expert_rank": 2}, Reason.RANK),
        ({"expert_parallel": None}, Reason.FACT_UNKNOWN),
        ({"expert_parallel": 0}, Reason.EXPERT_PARALLEL),
        ({"hidden": 0}, Reason.HIDDEN),
        ({"intermediate": -640}, Reason.INTERMEDIATE),
        ({"hidden": 0, "checkpoint_group": -1}, Reason.HIDDEN),
    ],
)
def test_ranks_and_sizes_that_make_no_sense_run_nowhere(changes: dict[str, Any], reason: Reason) -> None:
    """A rank that is unknown or outside of its group would load another rank's weights: no route at all."""
    admission = first(**changes)
    assert admission.last_resort.outcome is Outcome.UNSUPPORTED
    assert reason in admission.last_resort.reasons
    assert not admission.supported


def test_one_rank_need_not_say_which() -> None:
    """Without parallelism there is one rank, so that its number may be left out."""
    facts = contract_facts(FIRST, tensor_parallel=1, tensor_rank=None, expert_rank=None)
    assert admit(FIRST, settings(), facts, fake_machine()).supported


@pytest.mark.parametrize("feature", ["grouped_decode", "indexed_prefill", "qpn_m1"])
def test_native_routes_want_all_experts_local(feature: str) -> None:
    """Under expert parallelism a rank holds fewer experts than the contract says."""
    reasons = first(expert_parallel=2).decision(feature).reasons
    assert reasons == (Reason.EXPERT_PARALLEL,)


def test_a_feature_needs_a_last_resort() -> None:
    """Where `legacy` cannot run a layer no route runs it, and a `1` is refused rather than admitted in vain."""
    admission = first({"grouped_decode": "1"}, activations="float8_e4m3fn")
    assert [d.feature for d in admission.refused] == ["grouped_decode"]
    assert set(admission.decision("grouped_decode").reasons) == {Reason.NEED_NOT_ADMITTED, Reason.ACTIVATION_DTYPE}


def test_another_models_name_at_0_is_said_to_have_no_effect() -> None:
    """A `0` under a name that this policy lacks does not switch its feature off; that is a decision of its own."""
    policy = load_policy("qwen3-next-80b-a3b-awq-tp4")
    operator = settings(VLLM_SM70_AWQ_QWEN38_QPN_M1="0")
    admission = admit(policy, operator, contract_facts(policy), fake_machine())
    assert admission.decision("qpn_m1").admitted
    decision = admission.decision("VLLM_SM70_AWQ_QWEN38_QPN_M1")
    assert (decision.outcome, decision.reasons) == (Outcome.OFF, (Reason.FLAG_UNDECLARED,))


def test_a_native_backend_is_checked_though_the_policy_forgot_to_say_so() -> None:
    """Whether a backend needs machine code is the backend's own word."""
    features = {**FIRST.features, "qpn_m1": FIRST.features["qpn_m1"].model_copy(update={"native": False})}
    forgetful = FIRST.model_copy(update={"features": features})
    admission = admit(forgetful, settings(), contract_facts(FIRST), fake_machine(build="missing"))
    assert admission.decision("qpn_m1").reasons == (Reason.BUILD_MISSING,)


@pytest.mark.parametrize("answer", [None, True, ["no"]])
def test_a_check_that_gives_no_findings_is_an_error(answer: Any) -> None:
    """What a plug-in's check gives must be findings; anything else is a broken check, not a pass."""

    class Odd(Objector):
        def check(self, facts: LayerFacts) -> Any:
            return answer

    machine = fake_machine()
    backends = MappingProxyType({**machine.backends, "qpn": Odd(frozenset({"octet32"}), ())})
    decision = first(machine=replace(machine, backends=backends)).decision("qpn_m1")
    assert decision.reasons == (Reason.CHECK_BROKE,)


def test_a_check_written_as_a_generator_counts() -> None:
    """An objection that is yielded is an objection."""

    class Yields(Objector):
        def check(self, facts: LayerFacts) -> Any:
            yield Finding.failed("lanes", Reason.HIDDEN, 64, 2560)

    machine = fake_machine()
    backends = MappingProxyType({**machine.backends, "qpn": Yields(frozenset({"octet32"}), ())})
    assert first(machine=replace(machine, backends=backends)).decision("qpn_m1").reasons == (Reason.HIDDEN,)


# ---- a layer that is near another policy's contract ------------------------------------------------

NEAR = load_policy("qwen3-30b-a3b-awq-tp4")


def near_miss(others: list[Policy], **changes: Any) -> Decision:
    """The decision over `qpn_m1=1` for a layer like the first contract's that `generic-awq` speaks about."""
    return admit(
        GENERIC, settings({"qpn_m1": "1"}), contract_facts(FIRST, **changes), fake_machine(), others=iter(others)
    ).decision("qpn_m1")


def test_a_near_miss_is_told_by_what_differs() -> None:
    """One fact differs from the first contract, more from the others: that policy and that fact are named."""
    decision = near_miss([NEAR, FIRST, GENERIC], top_k=8)
    assert (decision.outcome, decision.reasons) == (Outcome.REFUSED, (Reason.FLAG_UNDECLARED, Reason.TOP_K))
    flag, differs = decision.findings
    assert (flag.check, flag.expected, flag.observed) == ("flag", list(GENERIC.features), "qpn_m1")
    assert FIRST.name in flag.hint
    assert GENERIC.name in flag.hint
    assert "top-k" in flag.hint
    assert (differs.check, differs.expected, differs.observed) == ("top-k", 10, 8)


def test_the_nearest_of_several_is_told_with_all_that_differs() -> None:
    """What is not known differs, too, and what agrees is left out."""
    decision = near_miss([NEAR, FIRST], activations=None, experts=256)
    assert [(f.check, f.status) for f in decision.findings[1:]] == [
        ("experts", Status.FAIL),
        ("activation dtype", Status.UNKNOWN),
    ]


def test_policies_that_are_as_near_are_told_in_the_order_of_their_names() -> None:
    """The same answer on every rank, whatever order policies were read in."""
    twins = [FIRST.model_copy(update={"name": name}) for name in ("b", "a", "c")]
    hints = {near_miss([*twins[n:], *twins[:n]], top_k=8).findings[0].hint for n in range(3)}
    assert len(hints) == 1
    assert "; a has the flag" in hints.pop()


def test_nothing_differs_where_only_the_choice_does() -> None:
    """The layer meets the other contract in full: the hint says how that policy is named."""
    decision = near_miss([FIRST])
    assert decision.reasons == (Reason.FLAG_UNDECLARED,)
    assert "SM70_MOE_POLICY" in decision.findings[0].hint


def test_no_policy_has_the_flag() -> None:
    """Then the policy's own flags are all that can be told; one without features has none."""
    (finding,) = near_miss([GENERIC]).findings
    assert (finding.check, finding.expected, finding.observed) == ("flag", list(GENERIC.features), "qpn_m1")
    bare = GENERIC.model_copy(update={"features": {}, "routes": GENERIC.routes[-1:]})
    (finding,) = (
        admit(bare, settings({"qpn_m1": "1"}), contract_facts(FIRST), fake_machine()).decision("qpn_m1").findings
    )
    assert finding.expected == []
    assert finding.hint != near_miss([GENERIC]).findings[0].hint


# ---- sizes that no bank holds ------------------------------------------------------------------------

SAMPLE = load_policy("sample-awq-tp2")


@pytest.mark.parametrize(
    ("changes", "matrix", "size"),
    [
        ({"hidden": 2880, "intermediate": 1440, "checkpoint_group": -1}, "W2", "K = 720"),
        ({"hidden": 2880, "intermediate": 1440, "checkpoint_group": 48}, "W2", "K = 720"),
        ({"hidden": 720, "intermediate": 1920, "checkpoint_group": -1}, "W13", "K = 720"),
    ],
)
def test_sizes_that_the_policys_bank_order_does_not_hold_are_refused_at_admission(
    changes: dict[str, Any], matrix: str, size: str
) -> None:
    """`octet32` holds blocks of 32 rows: a layer that passes every other check cannot be prepared, and that is said."""
    assert SAMPLE.routes[-1].order == "octet32"
    admission = admit(SAMPLE, settings(), contract_facts(SAMPLE, **changes), fake_machine())
    assert (admission.supported, admission.routes) == (False, ())
    (finding,) = [f for f in admission.last_resort.findings if f.check == "bank order"]
    assert (finding.reason, finding.expected) == (Reason.BANK_SIZES, "sizes that octet32 holds")
    assert isinstance(finding.observed, str)
    assert finding.observed.startswith(f"{matrix}: {size}")


def test_an_open_order_becomes_one_that_holds_the_sizes() -> None:
    """Where the policy leaves the order open, the same layer runs on tiles."""
    facts = contract_facts(SAMPLE, hidden=2880, intermediate=1440, checkpoint_group=48)
    layout = admit(GENERIC, settings(), facts, fake_machine()).layout
    assert layout is not None
    assert layout.order == "tile32x8"


def test_contract_facts_without_parallel_sizes_are_one_rank() -> None:
    """What the contract leaves open: one rank, AWQ, and the first layer of a model."""
    facts = contract_facts(GENERIC)
    assert (facts.tensor_parallel, facts.expert_parallel, facts.layer, facts.index) == (
        1,
        1,
        "model.layers.0.mlp.experts",
        0,
    )
    assert (facts.format, facts.packing) == ("awq", "gemm")


def test_findings_of_needs_and_flags_have_names() -> None:
    """Who reads a record finds a finding by its check."""
    decision = first({"legacy_single_token": "0"}).decision("qpn_m1")
    (finding,) = decision.obstacles
    assert (finding.check, finding.expected, finding.observed) == ("needs legacy_single_token", "admitted", "off")
    passed = next(f for f in first().decision("qpn_m1").findings if f.check.startswith("needs "))
    assert (passed.status, passed.observed) == (Status.PASS, "admitted")
