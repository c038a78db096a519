"""The operator: checked by torch itself, compiled without breaks, bound to one plan."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import BackendError
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.operator import register
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import fake_machine, settings

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


def build(flags: dict[str, str] | None = None) -> MoELayer:
    checkpoint = Checkpoint.open(TINY)
    found = checkpoint.layers[0]
    facts = checkpoint.facts(found, tensor_parallel=2, tensor_rank=0, device="cuda:0")
    service = AdmissionService(settings(flags), machine=fake_machine())
    return service.layer(facts, CheckpointSource(checkpoint, found, facts), device="cpu")


@pytest.fixture(scope="module")
def layer() -> MoELayer:
    return build()


@pytest.fixture(scope="module")
def handle(layer: MoELayer) -> str:
    return register(layer)


def call(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 256, generator=source).half()
    weights, ids = torch.rand(tokens, 16, generator=source).softmax(1).topk(4)
    return x, ids, weights


@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
def test_same_bits_as_the_layer(layer: MoELayer, handle: str, tokens: int) -> None:
    """The operator adds nothing to what the layer computes, with and without `out`."""
    x, ids, weights = call(tokens)
    wanted = layer(x, ids, weights)
    assert torch.equal(torch.ops.sm70_moe.experts(x, ids, weights, layer.plan.digest, handle), wanted)
    out = torch.full_like(x, torch.nan)
    torch.ops.sm70_moe.experts_out(x, ids, weights, layer.plan.digest, handle, out=out)
    assert torch.equal(out, wanted)


def test_gradients_are_refused_through_the_operator(layer: MoELayer, handle: str) -> None:
    """Eager and compiled; nothing is dropped in silence."""
    x, ids, weights = call(3)
    x.requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.sm70_moe.experts(x, ids, weights, layer.plan.digest, handle)
        return out * 2

    for way in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        with pytest.raises(Exception, match=r"requires_grad|autograd|backward"):
            way(x).sum().backward()
        with torch.no_grad():
            assert torch.isfinite(way(x)).all()


@pytest.mark.parametrize("tokens", [1, 9])
def test_opcheck(layer: MoELayer, handle: str, tokens: int) -> None:
    """torch's own checks of schema, fake kernels and mutation annotations pass."""
    arguments = (*call(tokens), layer.plan.digest, handle)
    torch.library.opcheck(torch.ops.sm70_moe.experts.default, arguments)
    out = {"out": torch.empty(tokens, 256).half()}
    torch.library.opcheck(torch.ops.sm70_moe.experts_out.default, arguments, out)


def test_compiles_in_one_piece_with_the_right_route(layer: MoELayer, handle: str) -> None:
    """fullgraph and dynamic: no break, one graph for all M, and each M takes its own route."""
    digest = layer.plan.digest

    def block(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.ops.sm70_moe.experts(x * 2, ids, weights, digest, handle) + 1

    taken: list[str] = []
    original = dict(layer.runs)
    for name, run in original.items():
        layer.runs[name] = lambda *a, _name=name, _run=run: (taken.append(_name), _run(*a))[1]
    try:
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens, route in ((1, "qpn_m1"), (2, "grouped_decode"), (8, "grouped_decode"), (9, "grouped_batch")):
            taken.clear()
            out = compiled(*call(tokens))
            assert taken == [route]
            assert torch.equal(out, block(*call(tokens)))
    finally:
        layer.runs.update(original)


def test_another_plan_is_an_error(layer: MoELayer, handle: str) -> None:
    """A graph that was made for another plan does not run this one by accident."""
    other = build({"qpn_m1": "0"})
    with pytest.raises(BackendError, match="was made for plan"):
        torch.ops.sm70_moe.experts(*call(1), other.plan.digest, handle)


def test_handles_are_unique_and_do_not_keep_layers_alive(layer: MoELayer, handle: str) -> None:
    """Two layers of one name get two handles; a layer that is gone is said to be gone."""
    assert register(layer) == handle
    other = build()
    second = register(other)
    assert second == f"{handle}#2"
    digest = other.plan.digest
    del other
    gc.collect()
    with pytest.raises(BackendError, match="gone"):
        torch.ops.sm70_moe.experts(*call(1), digest, second)
