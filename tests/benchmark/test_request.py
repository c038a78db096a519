"""A whole request: which calls it makes, and that every one of them is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sm70_moe.admission.admit import admit
from sm70_moe.benchmark.request import Part, Request, Stage, run
from sm70_moe.benchmark.weights import random_banks
from sm70_moe.cli.requested import record
from sm70_moe.errors import SettingsError
from sm70_moe.plan.memory import backend, bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.testing import contract_facts, fake_machine, settings


@pytest.mark.parametrize(
    ("prompt", "chunk", "chunks"), [(1, 8, (1,)), (8, 8, (8,)), (20, 8, (8, 8, 4)), (65_536, 8192, (8192,) * 8)]
)
def test_chunks_of_a_prompt(prompt: int, chunk: int, chunks: tuple[int, ...]) -> None:
    """Full ones and a rest."""
    assert Request(prompt, 4, 2, chunk).chunks == chunks


def test_counts_are_what_is_sent() -> None:
    """Each once; one token only where there is something to decode."""
    assert Request(20, 4, 2, 8).counts == (8, 4, 1)
    assert Request(20, 0, 2, 8).counts == (8, 4)
    assert Request(17, 3, 2, 8).counts == (8, 1)


@pytest.mark.parametrize("wrong", [{"prompt": 0}, {"decoded": -1}, {"layers": 0}, {"chunk": 0}])
def test_sizes_that_are_none(wrong: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Request(**{"prompt": 1, "decoded": 1, "layers": 1, "chunk": 1, **wrong})


class Counted:
    """A stopwatch on which everything takes 7 microseconds; a capture runs the work, and replays do what it says."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, work: Any) -> Any:
        self.captures += 1
        return work

    def elapsed(self, work: Any) -> float:
        work()
        return 7.0

    def wait(self) -> None: ...


@pytest.fixture(scope="module")
def plan() -> Plan:
    policy = load_policy("sample-awq-tp2")
    return Plan(admit(policy, settings(), contract_facts(policy, device="cpu"), fake_machine()))


def layers_of(plan: Plan, count: int) -> tuple[list[MoELayer], list[tuple[int, str, int, torch.Tensor]]]:
    """Layers whose routes note (layer, route, tokens, ids) and write zeros."""
    shape, layout = bank_shape(plan.admission), plan.layout
    assert shape is not None
    assert layout is not None
    calls: list[tuple[int, str, int, torch.Tensor]] = []
    backends = {route.backend: backend(plan.admission, route.backend) for route in plan.routes}
    layers = [MoELayer(plan, random_banks(layout, shape, "cpu", n), backends) for n in range(count)]
    for n, layer in enumerate(layers):
        for name in layer.runs:

            def noting(banks: object, call: Any, space: object, n: int = n, name: str = name) -> None:
                calls.append((n, name, call.tokens, call.ids.clone()))
                call.out.zero_()

            layer.runs[name] = noting
    return layers, calls


def test_every_call_is_made_and_counted(plan: Plan) -> None:
    """Warm-up, one call of each kind that is not timed, then exactly the request's; banks in turn; decode captured."""
    layers, calls = layers_of(plan, 2)
    watch, told = Counted(), []
    found = run(Request(20, 5, 3, 8), layers, watch, 0, told.append)
    routes = {count: plan.reachable(count)[0].name for count in (8, 4, 1)}
    assert [(p.phase, p.tokens, p.route, p.steps, p.layers) for p in found] == [
        ("prompt", 8, routes[8], 2, 3),
        ("prompt", 4, routes[4], 1, 3),
        ("decode", 1, routes[1], 5, 3),
    ]
    assert [p.microseconds for p in found] == [14.0, 7.0, 35.0]
    warm, timed = 3 * 2, [(8, 3), (4, 2), (1, 6)]
    assert len(calls) == warm + sum(steps * 3 for _, steps in timed)
    assert [n for n, *_ in calls[warm : warm + 6]] == [0, 1, 0, 0, 1, 0]
    assert watch.captures == 1
    assert told == ["warm-up", "prompt, 8 tokens a call", "prompt, 4 tokens a call", "decode"]


def test_ids_are_new_in_every_step(plan: Plan) -> None:
    """Different in a token, of this layer's experts, and of another draw each time."""
    layers, calls = layers_of(plan, 1)
    Stage.of(layers, 2, Counted(), 3).steps("prompt", 6, 4)
    experts = layers[0].banks.shape.experts
    ids = [call[3] for call in calls]
    assert all(((i >= 0) & (i < experts)).all() and (i.sort(1).values.diff(dim=1) > 0).all() for i in ids)
    assert len({tuple(i.flatten().tolist()) for i in ids}) == len(ids)


def test_the_record_adds_up(plan: Plan) -> None:
    """Plain JSON types; phases and the whole are sums of the parts."""
    parts = (
        Part("prompt", 8, "legacy", 2, 3, 60.0),
        Part("prompt", 4, "legacy", 1, 3, 9.0),
        Part("decode", 1, "q", 4, 3, 6.0),
    )
    found = json.loads(json.dumps(record(plan, Request(20, 4, 3, 8), parts, "cpu")))
    assert found["phases"] == {"prompt": 69.0, "decode": 6.0}
    assert found["microseconds"] == 75.0
    assert [(p["calls"], p["layer"]) for p in found["parts"]] == [(6, 10.0), (3, 3.0), (12, 0.5)]
