"""Which calls of a layer are slow: those whose first route has no machine code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.speed import is_native, slow_tokens, span_text, speed_text
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def plan(flags: dict[str, str] | None = None, build: str = "fake", **changes: Any) -> Plan:
    return Plan(admit(FIRST, settings(flags), contract_facts(FIRST, **changes), fake_machine(build=build)))


BATCHES = {"grouped_batch": "0"}
PREFILL = {"indexed_prefill": "0", "native_prefill": "0"}
DECODE = {"grouped_decode": "0", "native_decode": "0"}


@pytest.mark.parametrize(
    ("flags", "build", "slow"),
    [
        ({}, "fake", ""),
        (BATCHES, "fake", "9-127 tokens"),
        (PREFILL, "fake", "128+ tokens"),
        (BATCHES | PREFILL, "fake", "9+ tokens"),
        (DECODE, "fake", "2-127 tokens"),  # the batches do not stand in for what is switched off
        ({"qpn_m1": "0", "native_decode": "0"} | PREFILL, "fake", "1, 128+ tokens"),
        ({"qpn_m1": "0", "native_decode": "0"}, "fake", "1 tokens"),
        ({}, "missing", "all tokens"),
    ],
)
def test_token_counts_without_a_native_route(flags: dict[str, str], build: str, slow: str) -> None:
    """Neighbours are joined; the words for operators say the same."""
    found = plan(flags, build)
    assert slow_tokens(found) == slow
    assert speed_text(found) == (f"portable (slow: {slow})" if slow else "native")


def test_what_nothing_of_ours_runs() -> None:
    """A layer that is not quantised is the engine's; one that nobody can read is nobody's."""
    plain = plan(format="none", packing=None, bits=None, zero_point=None, checkpoint_group=None)
    assert speed_text(plain) == "not by us"
    assert speed_text(plan(bits=8)) == "nothing can"
    assert not is_native(plain, 1)


def test_the_first_route_of_a_length_counts() -> None:
    """Behind a native one there may be portable ones, and the other way round."""
    found = plan()
    assert is_native(found, 1)
    turned = Plan(replace(found.admission, routes=found.admission.routes[::-1]))
    assert not is_native(turned, 1)


def test_spans() -> None:
    """One count, several, and all from one on."""
    assert [span_text(1, 1), span_text(2, 8), span_text(9, None)] == ["1", "2-8", "9+"]
