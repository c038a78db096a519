"""Warm-up that follows the plan: what an engine will send runs once before it is needed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sm70_moe.errors import BackendError
from sm70_moe.facts import CallFacts, TensorFacts
from sm70_moe.runtime.layer import MoELayer


@dataclass(frozen=True, slots=True)
class Warmed:
    """One call that ran: a layer, its tokens, and the route that the plan gave it."""

    layer: str
    tokens: int
    route: str


def warm_up(layers: Sequence[MoELayer], tokens: Iterable[int]) -> tuple[Warmed, ...]:
    """Call each layer once for each different number of tokens, the largest first, and wait for the device.

    The calls are as an engine sends them: contiguous x in the facts' dtype (else FP16), INT32 ids, FP32
    router weights, a new output. They take the routes of the plan like any other, so what is loaded, compiled
    or asked of the allocator at a first call stands afterwards. Routes for odd strides or dtypes are not run.
    Holds x and out of the largest count; nothing is kept. Raises BackendError for a count that is no whole
    number from 1, while a CUDA graph is captured, and for what a call raises.
    """
    counts = sorted(set(map(checked, tokens)), reverse=True)
    if any(layer.banks.device.type == "cuda" for layer in layers) and torch.cuda.is_current_stream_capturing():
        raise BackendError("warm-up: a CUDA graph is being captured on this stream, expected a call before any capture")
    # under no_grad, not inference_mode: a layer may keep what it makes at a first call
    with torch.no_grad():
        warmed = tuple(call(layer, count) for count in counts for layer in layers)
    for device in {layer.banks.device for layer in layers}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what went wrong is told here, and not by somebody else's call
    return warmed


def checked(count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BackendError(f"warm-up: {count!r} tokens, expected whole numbers from 1")
    return count


def call(layer: MoELayer, tokens: int) -> Warmed:
    """One call; every expert that this many slots reach is asked for, spread evenly."""
    facts, banks = layer.plan.admission.facts, layer.banks
    dtype, top_k = getattr(torch, facts.activations or "float16"), facts.top_k or 1
    x = torch.ones(tokens, banks.shape.hidden, dtype=dtype, device=banks.device)
    slots = torch.arange(tokens * top_k, dtype=torch.int32, device=banks.device)
    ids = (slots % banks.shape.experts + layer.first).view(tokens, top_k)
    weights = torch.full((tokens, top_k), 1 / top_k, device=banks.device)
    out = torch.empty_like(x)
    route = layer.plan.route(CallFacts(*(TensorFacts.of(tensor) for tensor in (x, ids, weights, out))))
    assert route is not None  # there are tokens, and a layer without routes is not made
    layer(x, ids, weights, out)
    return Warmed(layer.plan.layer, tokens, route.name)
