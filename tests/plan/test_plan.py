"""Plans: the published route table, call conditions, digests that say what differs, memory."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.admission.admit import admit
from sm70_moe.facts import CallFacts, TensorFacts
from sm70_moe.layout import Metadata
from sm70_moe.plan.plan import Plan, compare_plans
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def plan(flags: dict[str, str] | None = None, build: Any = "fake", **changes: Any) -> Plan:
    return Plan(admit(FIRST, settings(flags), contract_facts(FIRST, **changes), fake_machine(build=build)))


def route(made: Plan, tokens: int) -> str | None:
    found = made.route(CallFacts.usual(tokens, 2560, 10))
    return found.name if found else None


FULL = {0: None, 1: "qpn_m1", 2: "grouped_decode", 3: "grouped_decode", 4: "grouped_decode", 5: "grouped_decode"} | {
    6: "grouped_decode",
    7: "grouped_decode",
    8: "grouped_decode",
    9: "grouped_batch",
    127: "grouped_batch",
    128: "indexed_prefill",
    8192: "indexed_prefill",
}
PORTABLE = dict.fromkeys(FULL, "legacy") | {0: None, 1: "legacy_single_token"}


@pytest.mark.parametrize(("tokens", "name"), FULL.items())
def test_published_table(tokens: int, name: str | None) -> None:
    """The route of each token count with everything admitted (CONTRACT 4)."""
    assert route(plan(), tokens) == name


@pytest.mark.parametrize(("tokens", "name"), PORTABLE.items())
def test_published_table_without_native_build(tokens: int, name: str | None) -> None:
    """Without a native build the older routes take over, each in its range."""
    assert route(plan(build="missing"), tokens) == name


def test_rolling_one_route_back() -> None:
    """A flag at 0 moves that route's calls, and no others."""
    made = plan({"qpn_m1": "0"})
    assert (route(made, 1), route(made, 2), route(made, 128)) == (
        "legacy_single_token",
        "grouped_decode",
        "indexed_prefill",
    )


def usual(**changes: TensorFacts) -> CallFacts:
    return replace(CallFacts.usual(1, 2560, 10), **changes)


@pytest.mark.parametrize(
    "call",
    [
        usual(x=TensorFacts.packed("bfloat16", 1, 2560)),
        usual(ids=TensorFacts.packed("int64", 1, 10)),
        usual(weights=TensorFacts.packed("float16", 1, 10)),
        usual(x=TensorFacts("float16", (1, 2560), (5120, 2), 256, False)),
        usual(x=TensorFacts.packed("float16", 1, 2560, alignment=8)),
        usual(out=TensorFacts.packed("float16", 1, 2560, alignment=2)),
        usual(out=TensorFacts("float16", (1, 2560), (1, 2), 256, False)),
    ],
    ids=["bf16", "int64-ids", "fp16-weights", "strided", "unaligned", "unaligned-out", "strided-out"],
)
def test_failed_call_condition_moves_on(call: CallFacts) -> None:
    """A call that misses a condition takes the next route in order, never an error."""
    found = plan().route(call)
    assert found is not None
    assert found.name == "legacy_single_token"


def test_a_call_of_another_shape_takes_the_route_without_shapes() -> None:
    """`qpn_m1` fixes its shapes, `native_decode` does not."""
    found = plan().route(usual(weights=TensorFacts.packed("float32", 1, 8)))
    assert found is not None
    assert found.name == "native_decode"


def test_one_live_row_in_a_padded_batch() -> None:
    """Physical rows decide: one live token padded to two takes the grouped route."""
    assert route(plan(), 2) == "grouped_decode"


def test_unsupported_layer_has_no_route() -> None:
    """A layer that nothing can run has no route to give; a call without tokens needs none."""
    made = plan(bits=8)
    assert not made.supported
    assert made.memory is None
    assert made.route(CallFacts.usual(0, 2560, 10)) is None
    with pytest.raises(LookupError, match="unsupported"):
        made.route(CallFacts.usual(1, 2560, 10))


@given(st.integers(1, 10_000))
def test_every_count_has_a_last_resort(tokens: int) -> None:
    """Whatever the call looks like, the last reachable route takes it."""
    reachable = MADE.reachable(tokens)
    assert reachable[-1].route.unconditional
    odd = CallFacts(
        TensorFacts("float32", (tokens, 2560), (1, tokens), 4, False),
        TensorFacts.packed("int32", tokens, 10),
        TensorFacts.packed("float32", tokens, 10),
    )
    assert MADE.route(odd) in reachable


MADE = plan()


def test_plan_cannot_be_changed() -> None:
    """Plans are frozen from the start."""
    with pytest.raises(FrozenInstanceError):
        MADE.digest = "other"  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer": "model.layers.7.mlp.experts", "index": 7}, None),
        ({"tensor_rank": 3}, None),
        ({"experts": 256}, "facts.experts"),
        ({"checkpoint_group": 128}, "facts.checkpoint_group"),
        ({"activations": "bfloat16"}, "facts.activations"),
    ],
)
def test_digest_changes_with_what_matters(changes: dict[str, Any], field: str | None) -> None:
    """Layer and rank leave the digest alone; what alters the run changes it, and is named."""
    other = plan(**changes)
    fields = {difference.field for difference in compare_plans(plan(), other)}
    assert (other.digest == plan().digest) is (field is None)
    assert field in fields if field else not fields


def test_difference_in_flags_and_build_is_named() -> None:
    """Ranks with another flag or another build can be told which."""
    flags = {d.field: (d.first, d.second) for d in compare_plans(plan(), plan({"qpn_m1": "0"}))}
    assert flags["flags.qpn_m1"] == ("auto", "off")
    builds = {d.field: (d.first, d.second) for d in compare_plans(plan(), plan(build="missing"))}
    assert builds["build"] == ("fake-build", None)


def test_the_fields_say_how_a_layer_is_laid_out_and_where_it_runs() -> None:
    """Banks and architecture stand for themselves; the device's number and its owner do not."""
    fields = plan(device="cuda:0", architecture="sm_70").fields()
    assert (fields["layout"], fields["architecture"]) == ("octet32/3-byte/group-32/interleaved/batched", "sm_70")
    assert isinstance(fields["facts"], dict)
    left_out = {"layer", "index", "tensor_rank", "expert_rank", "device", "architecture"}
    assert not left_out & fields["facts"].keys()
    assert plan(activation="gelu").fields()["layout"] is None


def test_memory_that_a_device_keeps_is_that_of_the_largest_resident_call() -> None:
    """It is stated, and part of the record with every route's workspace."""
    memory = plan().memory
    assert memory is not None
    resident = [size for (name, tokens), size in memory.workspace.items() if name != "legacy" and tokens <= 8]
    assert memory.resident >= max(resident) > 0
    record = memory.record()
    assert isinstance(record["workspace"], list)
    assert len(record["workspace"]) == len(memory.workspace)


def test_memory_of_the_first_contract() -> None:
    """48 layers: 15,099,494,400 B of codes, 3.515625 GiB of 4-byte metadata, 943,718,400 B saved."""
    memory = plan().memory
    assert memory is not None
    assert memory.weights * 48 == 15_099_494_400
    assert memory.metadata[Metadata.FOUR_BYTE] * 48 == 3.515625 * 2**30
    saved = memory.metadata[Metadata.FOUR_BYTE] - memory.metadata[Metadata.THREE_BYTE]
    assert saved * 48 == 943_718_400
    assert memory.banks == memory.weights + memory.metadata[Metadata.THREE_BYTE]


def test_fallback_needs_no_more_scratch_than_planned() -> None:
    """Scratch is stated for every route that a count may take, so the largest covers a fallback."""
    memory = plan().memory
    assert memory is not None
    for tokens in (1, 8, 128):
        stated = {name for (name, count) in memory.workspace if count == tokens}
        assert stated == {r.name for r in plan().reachable(tokens)}


def test_uneven_expert_parallel_counts_this_ranks_experts() -> None:
    """512 experts over three ranks are 171, 171 and 170."""
    sizes = [plan(expert_parallel=3, expert_rank=rank).memory for rank in range(3)]
    per_expert = 3 * 2560 * 160 // 2
    assert [m.weights // per_expert for m in sizes if m] == [171, 171, 170]
