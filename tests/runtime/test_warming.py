"""Warm-up: exactly the routes and token counts that were asked for, and nothing else."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import BackendError
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.runtime.warming import warm_up
from sm70_moe.testing import fake_machine, settings

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


class Told:
    """A sink that notes events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def admitted(self, admission: object) -> None: ...

    def event(self, name: str, level: str = "info", **fields: Any) -> None:
        self.events.append((name, fields))

    def flush(self) -> None: ...


def made(service: AdmissionService, **ranks: int) -> list[MoELayer]:
    checkpoint = Checkpoint.open(TINY)
    layers = []
    for found in checkpoint.layers:
        facts = checkpoint.facts(found, **{"tensor_parallel": 2, "tensor_rank": 0, "device": "cpu", **ranks})
        layers.append(service.layer(facts, CheckpointSource(checkpoint, found, facts)))
    return layers


def noted(layer: MoELayer) -> list[tuple[str, int, torch.dtype]]:
    """What a layer's routes are called with from now on."""
    calls: list[tuple[str, int, torch.dtype]] = []
    for name, run in list(layer.runs.items()):

        def noting(banks, call, space, name=name, run=run):  # type: ignore[no-untyped-def]  # what a backend's run has
            calls.append((name, call.tokens, call.x.dtype))
            run(banks, call, space)

        layer.runs[name] = noting
    return calls


def test_every_layer_runs_each_count_once_and_the_largest_first() -> None:
    """By the plan's own route; a count that is given twice runs once; it is told once."""
    told = Told()
    with capture_logs():
        service = AdmissionService(settings(), machine=fake_machine(), sinks=(told,))
        layers = made(service)
        calls = [noted(layer) for layer in layers]
        warmed = service.warm_up([1, 9, 3, 9])
    routes = [layer.plan.reachable(count)[0].name for layer in layers[:1] for count in (9, 3, 1)]
    assert [(name, tokens) for name, tokens, _ in calls[0]] == list(zip(routes, (9, 3, 1), strict=True))
    assert {len(found) for found in calls} == {3}
    assert [(w.layer, w.tokens, w.route) for w in warmed] == [
        (layer.plan.layer, count, route) for count, route in zip((9, 3, 1), routes, strict=True) for layer in layers
    ]
    ((_, fields),) = [event for event in told.events if event[0] == "moe warm-up"]
    assert fields == {
        "layers": len(layers),
        "calls": sorted(f"{c} {r}" for c, r in zip((9, 3, 1), routes, strict=True)),
    }


def test_a_layer_behaves_as_before() -> None:
    """The same bits with and without, in the engine's dtype, and for experts of another rank too."""
    with capture_logs():
        service = AdmissionService(settings(), machine=fake_machine())
        layer = made(service, tensor_parallel=1, tensor_rank=0, expert_parallel=2, expert_rank=1)[0]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).half()
    ids, weights = torch.arange(12).view(3, 4), torch.full((3, 4), 0.25)
    before = layer(x, ids, weights)
    calls = noted(layer)
    assert [w.tokens for w in warm_up([layer], (2,))] == [2]
    assert [(tokens, dtype) for _, tokens, dtype in calls] == [(2, torch.float16)]
    assert torch.equal(layer(x, ids, weights), before)


def test_experts_of_this_rank_are_asked_for() -> None:
    """Ids are those of the whole layer: none of the calls is empty."""
    with capture_logs():
        service = AdmissionService(settings(), machine=fake_machine())
        layer = made(service, tensor_parallel=1, tensor_rank=0, expert_parallel=2, expert_rank=1)[0]
    seen: list[torch.Tensor] = []
    for name in layer.runs:
        layer.runs[name] = lambda banks, call, space: seen.append(call.ids.clone())
    warm_up([layer], (8,))
    assert sorted(set(seen[0].flatten().tolist())) == list(range(8))


def test_layers_that_are_gone_are_not_kept() -> None:
    """A service does not hold what it made."""
    with capture_logs():
        service = AdmissionService(settings(), machine=fake_machine())
        layers = made(service)
        layers.clear()
        gc.collect()
        assert service.warm_up((1,)) == ()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "8", None])
def test_counts_that_are_none(count: Any) -> None:
    """Named, before anything runs."""
    with pytest.raises(BackendError, match="whole numbers from 1"):
        warm_up((), (4, count))


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be part of the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layer: Any = SimpleNamespace(banks=SimpleNamespace(device=torch.device("cuda", 0)))
    with pytest.raises(BackendError, match="captured"):
        warm_up([layer], (1,))
