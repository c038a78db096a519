"""Sizes and memory of a plan: what chooses kernels, what would be compiled, what a device keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sm70_moe.admission.admit import Admission, admit
from sm70_moe.errors import BackendError
from sm70_moe.kernels.native.specialised import Layer
from sm70_moe.layout import BankShape
from sm70_moe.plan.memory import bank_shape, resident, workspace_of
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.specialised import layer_of, sizes_of, wanted_by
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def first(flags: dict[str, str] | None = None, build: str = "fake", **changes: Any) -> Admission:
    return admit(FIRST, settings(flags), contract_facts(FIRST, **changes), fake_machine(build=build))


def test_sizes_by_name() -> None:
    """A rank's; the group is the layout's, and unknown without one."""
    assert sizes_of(first()) == {"hidden": 2560, "intermediate": 160, "experts": 512, "top_k": 10, "group": 32}
    assert sizes_of(first(bits=8))["group"] is None


@pytest.mark.parametrize(("dtype", "kernels"), [("float16", "float16"), ("bfloat16", "bfloat16"), (None, "float16")])
def test_what_kernels_are_made_for(dtype: str | None, kernels: str) -> None:
    """Shape, layout, top-k, architecture and dtype; nothing where one of them is not known."""
    found = first(activations=dtype)
    assert found.layout is not None
    assert layer_of(found) == Layer(BankShape(512, 2560, 160), found.layout, 10, "sm_70", kernels)
    for missing in (
        replace(found, layout=None),
        replace(found, device=None),
        replace(found, facts=replace(found.facts, top_k=None)),
        replace(found, facts=replace(found.facts, hidden=None)),
    ):
        assert layer_of(missing) is None


def test_routes_that_kernels_could_be_made_for() -> None:
    """Those of native backends for which the build wants something, each with what; it is asked with all sizes."""
    plan = Plan(first())
    asked = []

    def wanted(backend: str, sizes: Any, layer: Any) -> tuple[str, ...]:
        asked.append((backend, sizes, layer))
        return () if backend == "grouped" else (f"kernel of {backend}",)

    found = [(route.name, jobs) for route, jobs in wanted_by(plan, SimpleNamespace(wanted=wanted))]  # type: ignore[arg-type]
    native = [route for route in plan.routes if route.backend != "legacy"]
    assert found == [(r.name, (f"kernel of {r.backend}",)) for r in native if r.backend != "grouped"]
    assert [one[0] for one in asked] == [route.backend for route in native]
    assert all(one[1:] == (sizes_of(plan.admission), layer_of(plan.admission)) for one in asked)


def test_memory_in_plain_types() -> None:
    """Every key of a record, and what it holds."""
    memory = Plan(first()).memory
    assert memory is not None
    record = memory.record()
    assert list(record) == ["weights", "metadata", "metadata_layout", "banks", "resident", "workspace"]
    assert (record["weights"], record["banks"], record["resident"]) == (memory.weights, memory.banks, memory.resident)
    assert record["metadata_layout"] == "3-byte"
    assert record["metadata"] == {kind.value: size for kind, size in memory.metadata.items()}
    assert record["workspace"] == [
        {"route": route, "tokens": tokens, "bytes": size} for (route, tokens), size in memory.workspace.items()
    ]


class Runs:
    """A backend of which only the working memory counts: its tokens."""

    name, options = "runs", frozenset()

    def __init__(self, native: bool) -> None:
        self.native = native

    def workspace(self, shape: BankShape, top_k: int, tokens: int) -> int:
        if tokens > 1000:
            raise ValueError("too many")
        return 100 * tokens + top_k


@pytest.mark.parametrize(
    ("native", "flags", "sequences", "kept"),
    [
        (True, {}, 32, 3210),  # 32 tokens
        (True, {}, 4, 410),
        (True, {}, 9, 910),  # the first count of another route
        (True, {"grouped_batch": "0"}, 32, 810),  # the longest call that is left has 8
        (False, {}, 32, 0),  # the portable one asks torch
    ],
)
def test_a_device_keeps_what_its_longest_resident_native_call_takes(
    native: bool, flags: dict[str, str], sequences: int, kept: int
) -> None:
    """Of routes that begin within the resident tokens; prefill takes its memory as it runs."""
    found = first(flags, max_sequences=sequences)
    backends = {name: Runs(native and name != "legacy") for name in found.machine.backends}
    found = replace(found, machine=replace(found.machine, backends=backends))
    assert resident(found, BankShape(512, 2560, 160), 10) == kept


def test_a_backend_that_cannot_say_it_is_named() -> None:
    """With what it raised."""
    with pytest.raises(BackendError, match=r"backend 'runs': workspace\(\) raised ValueError: too many"):
        workspace_of(Runs(True), BankShape(1, 32, 32), 1, 1001)  # type: ignore[arg-type]  # what is asked of it
    assert workspace_of(Runs(True), BankShape(1, 32, 32), 1, 7) == 701  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "rank", "experts"), [(None, None, 10), (1, 0, 10), (3, 0, 4), (3, 1, 3), (3, 2, 3), (4, None, 3)]
)
def test_experts_of_a_rank(size: int | None, rank: int | None, experts: int) -> None:
    """All of them where nothing is said; the first ranks have one more."""
    found = first(expert_parallel=1)
    facts = replace(found.facts, experts=10, expert_parallel=size, expert_rank=rank)
    assert bank_shape(replace(found, facts=facts)) == BankShape(experts, 2560, 160)
    for unknown in ("hidden", "intermediate", "experts"):
        assert bank_shape(replace(found, facts=replace(facts, **{unknown: None}))) is None
