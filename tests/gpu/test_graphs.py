"""CUDA graphs: a replay has the bits of an eager call, with other inputs and routing in the same buffers."""

from __future__ import annotations

import json

import pytest
import torch

from sm70_moe.errors import Sm70MoeError
from sm70_moe.evidence.trial import Inputs, same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[True, False], ids=["dependent", "plain"])
def subject(request: pytest.FixtureRequest, layers):
    return layers.make(dependent=request.param)


def calls_of(subject, tokens: int) -> list[Inputs]:
    """Other x, ids and weights each time."""
    return [subject.call(tokens, seed=2), subject.mixed(tokens, seed=3), subject.mixed(tokens, seed=4)]


@pytest.mark.parametrize("tokens", range(1, 9))
def test_eager_equals_replay(subject, graph_of, move, tokens: int) -> None:
    """On a poisoned output."""
    held = subject.call(tokens, seed=1)
    out = torch.full_like(held.x, torch.nan)
    graph = graph_of(lambda: subject.layer(held.x, held.ids, held.weights, out))
    for fresh in calls_of(subject, tokens):
        move(fresh, held)
        out.fill_(torch.nan)
        graph.replay()
        assert same_bits(out, subject.answer(fresh))


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_captured_call_may_convert_and_allocate(subject, graph_of, tokens: int) -> None:
    """INT64 ids, FP16 weights and no output given: the graph's own memory pool serves."""
    held = subject.call(tokens, seed=1)
    ids, weights, outs = held.ids.long(), held.weights.half(), []
    graph = graph_of(lambda: outs.append(subject.layer(held.x, ids, weights)))
    for fresh in calls_of(subject, tokens):
        held.x.copy_(fresh.x)
        ids.copy_(fresh.ids)
        weights.copy_(fresh.weights)
        graph.replay()
        assert same_bits(outs[-1], subject.answer(Inputs(fresh.x, fresh.ids, weights.float())))


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("dependent", [True, False])
def test_two_layers_in_one_graph(layers, graph_of, move, tokens: int, dependent: bool) -> None:
    """Of two services, with their own banks and scratch: side by side, and the second on the first's output."""
    first = layers.make(dependent=dependent)
    service = layers.service(first.sizes, metadata="3-byte", machine=layers.machine(dependent))
    second = layers.layer(service, first.sizes, number=1)
    held = first.call(tokens), second.call(tokens)
    outs = [torch.full_like(held[0].x, torch.nan) for _ in range(3)]

    def work() -> None:
        first.layer(held[0].x, held[0].ids, held[0].weights, outs[0])
        second.layer(held[1].x, held[1].ids, held[1].weights, outs[1])
        second.layer(outs[0], held[1].ids, held[1].weights, outs[2])

    graph = graph_of(work)
    for seed in (5, 6):
        one, other = first.mixed(tokens, seed), second.mixed(tokens, seed + 10)
        move(one, held[0])
        move(other, held[1])
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        middle = first.answer(one)
        assert same_bits(outs[0], middle)
        assert same_bits(outs[1], second.answer(other))
        assert same_bits(outs[2], second.answer(Inputs(middle, other.ids, other.weights)))


def test_replays_in_a_row(subject, graph_of) -> None:
    """Eight layers' worth of calls in a graph, replayed a hundred times without a stop."""
    calls = [subject.mixed(tokens, seed=tokens) for tokens in range(1, 9)]
    wanted = [subject.answer(call) for call in calls]
    outs = [torch.full_like(call.x, torch.nan) for call in calls]

    def work() -> None:
        for call, out in zip(calls, outs, strict=True):
            subject.layer(call.x, call.ids, call.weights, out)

    graph = graph_of(work)
    for out in outs:
        out.fill_(torch.nan)
    for _ in range(100):
        graph.replay()
    assert all(map(same_bits, outs, wanted))


def test_a_capture_is_on_record_and_freezes_the_plans(layers, graph_of, tmp_path) -> None:
    """One line for each layer, number of tokens and route; no layer is admitted after it; eager calls go on."""
    sizes = layers.make().sizes
    service = layers.service(sizes, SM70_MOE_JOURNAL=str(tmp_path / "journal.jsonl"))
    subject = layers.layer(service, sizes)
    layers.layer(service, sizes, number=1)  # nothing is frozen before
    calls = [subject.call(tokens) for tokens in (1, 4)]
    before = [subject.answer(call) for call in calls]
    assert '"moe capture"' not in (tmp_path / "journal.rank0.jsonl").read_text()
    for call in (*calls, *calls):
        graph_of(lambda call=call: subject.layer(call.x, call.ids, call.weights))
    lines = map(json.loads, (tmp_path / "journal.rank0.jsonl").read_text().splitlines())
    captured = [line for line in lines if line["event"] == "moe capture"]
    plan = subject.layer.plan
    assert [(c["layer"], c["tokens"], c["route"], c["plan"]) for c in captured] == [
        (plan.layer, 1, "qpn_m1", plan.digest),
        (plan.layer, 4, "grouped_decode", plan.digest),
    ]
    with pytest.raises(Sm70MoeError, match="closed"):
        service.admit(layers.facts(service, number=2))
    assert service.admit(layers.facts(service)) is plan
    assert all(same_bits(subject.answer(call), bits) for call, bits in zip(calls, before, strict=True))
