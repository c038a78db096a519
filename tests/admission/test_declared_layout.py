"""Banks and routes agree: no native route is admitted on banks that its backend is not declared to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sm70_moe.admission.admit import Admission, admit
from sm70_moe.decision import Outcome, Reason, Scope
from sm70_moe.errors import PolicyError
from sm70_moe.kernels.capability import Capability, Reads, Span
from sm70_moe.kernels.protocol import Broken
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import Policy, load_policy, parse_policy
from sm70_moe.settings.settings import Settings
from sm70_moe.testing import contract_facts, fake_machine, settings

NAME = "qwen3.8-flash-next-awq-tp4"
FIRST = load_policy(NAME)
SIX = ("batched_banks", "compact_metadata", "qpn_m1", "legacy_single_token", "grouped_decode", "indexed_prefill")
ROLLBACK = "VLLM_SM70_AWQ_MOE_LEGACY_SINGLE_TOKEN_COMPACT"
GATE_UP = ("gate and up interleaved", "all gates, then all ups")


def edited(*edits: tuple[str, str], name: str = NAME, backends: tuple[str, ...] | None = None) -> Policy:
    """A shipped policy after replacing pieces of its file."""
    text = Path(load_policy(name).origin).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return parse_policy(text, "EDITED", backends=backends)


def without(name: str, *features: str) -> Policy:
    """A shipped policy without some of its features and their routes, needs and evidence."""
    policy = load_policy(name)
    kept = {
        key: feature.model_copy(update={"needs": tuple(need for need in feature.needs if need not in features)})
        for key, feature in policy.features.items()
        if key not in features
    }
    routes = tuple(route for route in policy.routes if route.feature not in features)
    return policy.model_copy(update={"features": MappingProxyType(kept), "routes": routes})


def admitted(policy: Policy, operator: Settings, machine: Machine | None = None, **changes: Any) -> Admission:
    return admit(policy, operator, contract_facts(policy, **changes), machine or fake_machine())


def unread(admission: Admission, architecture: str = "sm_70") -> list[str]:
    """Admitted routes whose backend does not read the layer's banks."""
    assert admission.layout is not None
    found = []
    for route in admission.routes:
        backend = admission.machine.backends[route.backend]
        assert not isinstance(backend, Broken)
        ability = backend.can(architecture)
        assert ability is not None
        if not ability.reads.takes(admission.layout):
            found.append(route.name)
    return found


# ---- the rollback of the first contract ----------------------------------------------------------


def test_a_rolled_back_single_token_route_leaves_no_native_route() -> None:
    """Without the feature that interleaves W13 the banks are gate-up: no native kernel reads those."""
    admission = admitted(FIRST, Settings.from_env({ROLLBACK: "0"}))
    assert admission.layout is not None
    assert admission.layout.tag == "octet32/3-byte/group-32/gate-up/batched"
    assert [route.name for route in admission.routes] == ["legacy"]
    assert admission.refused == ()
    for name in ("grouped_decode", "indexed_prefill"):
        decision = admission.decision(name)
        (finding,) = decision.obstacles
        assert decision.outcome is Outcome.FELL_BACK
        assert (finding.reason, finding.check) == (Reason.LAYOUT_UNREADABLE, "W13 columns")
        assert (finding.expected, finding.observed) == GATE_UP
    assert admission.decision("qpn_m1").reasons == (Reason.NEED_NOT_ADMITTED,)


@pytest.mark.parametrize("name", ["grouped_decode", "indexed_prefill"])
def test_a_required_native_route_on_gate_up_banks_is_refused(name: str) -> None:
    """An explicit 1 beside the rollback cannot be met, and says why."""
    admission = admitted(FIRST, settings({"legacy_single_token": "0", name: "1"}))
    assert [(d.feature, d.reasons) for d in admission.refused] == [(name, (Reason.LAYOUT_UNREADABLE,))]
    assert name not in [route.name for route in admission.routes]


def test_layouts_that_nobody_reads_are_the_policys_matter() -> None:
    """Every layer of the model has the same banks, so that admit-the-rest does not excuse it."""
    assert (Reason.LAYOUT_UNREADABLE.scope, Reason.TOKENS.scope) == (Scope.POLICY, Scope.POLICY)
    lenient = edited(('mixed_model  = "refuse"', 'mixed_model  = "admit-the-rest"'))
    decision = admitted(lenient, settings({"legacy_single_token": "0", "grouped_decode": "1"})).decision(
        "grouped_decode"
    )
    assert decision.outcome is Outcome.REFUSED


# ---- a policy that says nothing about W13 ----------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"grouped_decode": "1"}])
@pytest.mark.parametrize("name", [NAME, "qwen3-30b-a3b-awq-tp4", "qwen3-next-80b-a3b-awq-tp4", "sample-awq-tp2"])
def test_without_an_interleaving_feature_banks_become_what_native_routes_read(name: str, flags: dict[str, str]) -> None:
    """What no feature decides is open, and is decided by the routes: interleaved."""
    policy = without(name, "legacy_single_token")
    admission = admitted(policy, settings(flags))
    assert admission.layout is not None
    assert admission.layout.interleaved
    assert "grouped_decode" in [route.name for route in admission.routes]
    assert unread(admission) == []


def test_without_native_routes_an_open_layout_is_gate_up() -> None:
    """Nobody asks for interleaved columns then: the plain order comes first."""
    policy = without(NAME, "legacy_single_token")
    layout = admitted(policy, settings(), fake_machine(build="missing")).layout
    assert layout is not None
    assert not layout.interleaved


def test_without_a_batching_feature_experts_stand_in_one_tensor_for_native_routes() -> None:
    """The same for batches, and for the kind of metadata: four bytes come first."""
    policy = without(NAME, "batched_banks", "compact_metadata")
    admission = admitted(policy, settings())
    assert admission.layout is not None
    assert admission.layout.tag == "octet32/4-byte/group-32/interleaved/batched"
    assert [route.name for route in admission.routes] == [route.name for route in FIRST.routes]


# ---- every combination of flags --------------------------------------------------------------------

KINDS = {
    "3-byte": FIRST,
    "2.5-byte": edited(('metadata = "3-byte"', 'metadata = "2.5-byte"')),
    "open": edited(('metadata = "3-byte"\n', "")),
}


def combinations() -> Iterator[dict[str, str]]:
    for values in product(("0", "1", None), repeat=6):
        yield {name: value for name, value in zip(SIX, values, strict=True) if value is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_of_six_flags(kind: str) -> None:
    """3^6 settings for each kind of metadata: what is admitted reads the banks, a 1 is admitted or refused."""
    policy, machine = KINDS[kind], fake_machine()
    facts = contract_facts(policy)
    tags = set()
    for flags in combinations():
        admission = admit(policy, settings(flags), facts, machine)
        assert unread(admission) == [], flags
        assert admission.layout is not None
        tags.add(admission.layout.tag)
        native = [route for route in admission.routes if route.backend != "legacy"]
        assert admission.layout.interleaved or not native, flags
        assert admission.layout.batched or not native, flags
        wanted = {name for name, value in flags.items() if value == "1"}
        refused = {decision.feature for decision in admission.refused}
        assert refused == {name for name in wanted if not admission.decision(name).admitted}, flags
        off = [name for name, value in flags.items() if value == "0"]
        assert not any(admission.decision(name).admitted for name in off), flags
    wide, compact = ("4-byte", kind) if kind != "open" else ("4-byte", "4-byte")
    assert {tag.split("/")[1] for tag in tags} == {wide, compact}
    assert {tag.split("/")[3] for tag in tags} == {"interleaved", "gate-up"}


def test_all_flags_at_1_are_admitted_for_each_kind_of_metadata() -> None:
    """The same combinations are not empty: with all six required nothing is refused."""
    for kind, policy in KINDS.items():
        admission = admitted(policy, settings(dict.fromkeys(SIX, "1")))
        assert admission.refused == ()
        assert len(admission.routes) == 8
        assert admission.layout is not None
        assert admission.layout.metadata == ("4-byte" if kind == "open" else kind)


# ---- token ranges ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "old", "new", "accepted"),
    [
        ("grouped", "tokens  = [2, 8]", "tokens  = [1, 8]", "2 to 8"),
        ("grouped", "tokens  = [2, 8]", "tokens  = [2, 16]", "2 to 8"),
        ("grouped", "tokens  = [2, 8]", "tokens  = { from = 2 }", "2 to 8"),
        ("grouped", "tokens  = [2, 8]", "tokens  = [9, 16]", "2 to 8"),
    ],
)
def test_a_range_that_the_backend_does_not_run_is_a_fault_of_the_policy(
    backend: str, old: str, new: str, accepted: str
) -> None:
    """Told by the check with line, place and the accepted range; it never gets as far as a call."""
    with pytest.raises(PolicyError) as caught:
        edited((old, new))
    lines = Path(FIRST.origin).read_text().splitlines()
    line = lines.index(old) + 1
    (problem,) = [p for p in caught.value.problems if "tokens" in p.split(":")[2]]
    assert problem.startswith(f"EDITED:{line}: route[1].tokens: found ")
    assert f"accepted {accepted} tokens, which backend {backend} runs" in problem


@pytest.mark.parametrize(
    ("span", "text"), [(Span(2, 4), "2 to 4"), (Span(3, 8), "3 to 8"), (Span(8, 8), "8"), (Span(9), "9 and more")]
)
def test_a_plug_ins_narrower_range_is_seen_at_admission(span: Span, text: str) -> None:
    """What a plug-in runs is asked of it for each layer: the route falls back with both ranges."""
    machine = with_backend("grouped", Capability(span, Reads(frozenset({"octet32"})), frozenset({"float16"})))
    decision = admitted(FIRST, settings(), machine).decision("grouped_decode")
    (finding,) = decision.obstacles
    assert decision.outcome is Outcome.FELL_BACK
    assert (finding.reason, finding.expected, finding.observed) == (Reason.TOKENS, text, "2 to 8")
    required = admitted(FIRST, settings({"grouped_decode": "1"}), machine)
    assert [d.feature for d in required.refused] == ["grouped_decode"]


def with_backend(name: str, ability: Capability | None) -> Machine:
    """A machine whose backend of that name says that it can do this."""
    machine = fake_machine()
    fake: Any = Declared(name, ability)
    return replace(machine, backends=MappingProxyType({**machine.backends, name: fake}))


class Declared:
    """A backend that is nothing but its declaration."""

    native, options = True, frozenset[str]()

    def __init__(self, name: str, ability: Capability | None) -> None:
        self.name, self.ability = name, ability

    def can(self, architecture: str | None) -> Capability | None:
        return self.ability

    def check(self, facts: object) -> tuple[()]:
        return ()

    def workspace(self, *_: object) -> int:
        return 0

    prepare = run = workspace


def test_a_plug_in_without_kernels_for_the_device_is_not_admitted() -> None:
    """`can` says None: it has no kernels there, so that no call may be sent to it."""
    mine = edited(('backend = "grouped"', 'backend = "mine"'), backends=("decode", "qpn", "indexed", "legacy", "mine"))
    decision = admitted(mine, settings(), with_backend("mine", None)).decision("grouped_decode")
    assert decision.outcome is Outcome.FELL_BACK
    (finding,) = decision.obstacles
    assert (finding.reason, finding.expected, finding.observed) == (
        Reason.ARCH_MISSING,
        "kernels of backend 'mine' for sm_70",
        "none",
    )


# ---- formats -----------------------------------------------------------------------------------------

FORMATS = [
    ("awq", "gemm", True),
    ("gptq", "gptq", True),
    ("gptq", "gptq_v2", True),
    ("compressed-tensors", "pack-quantized", True),
]


@pytest.mark.parametrize("flags", [{}, dict.fromkeys(SIX, "1")], ids=["auto", "required"])
@pytest.mark.parametrize(("form", "packing", "zero_point"), FORMATS)
def test_every_format_that_can_be_read_gets_the_native_routes(
    form: str, packing: str, zero_point: bool, flags: dict[str, str]
) -> None:
    """The same banks, hence the same kernels, whatever the checkpoint's format was."""
    admission = admitted(FIRST, settings(flags), format=form, packing=packing, zero_point=zero_point)
    assert admission.refused == ()
    assert [route.name for route in admission.routes] == [route.name for route in FIRST.routes]
    assert admission.layout is not None
    assert admission.layout.tag == "octet32/3-byte/group-32/interleaved/batched"


def test_a_policy_may_still_insist_on_a_format() -> None:
    """One that names a format has every other one fall back."""
    strict = edited(("weights         = { bits = 4", 'weights         = { format = "awq", bits = 4'))
    admission = admitted(strict, settings(), format="gptq", packing="gptq")
    assert admission.decision("grouped_decode").reasons == (Reason.FORMAT,)
