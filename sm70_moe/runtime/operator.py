"""`torch.ops.sm70_moe.experts`: a layer as one operator that compilers and graphs can hold.

A compiled graph cannot hold a `MoELayer`, so the operator takes a handle. It also takes the plan's
digest: graphs and their cache keys then change with the plan, and a graph of an older plan is an
error, not a silent other route.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from sm70_moe.errors import BackendError
from sm70_moe.runtime.layer import MoELayer

_LIBRARY: Any = torch.library.Library("sm70_moe", "DEF")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_LIBRARY.define("experts(Tensor x, Tensor ids, Tensor weights, str plan, str layer) -> Tensor")
_LIBRARY.define("experts_out(Tensor x, Tensor ids, Tensor weights, str plan, str layer, *, Tensor(a!) out) -> ()")

_layers: weakref.WeakValueDictionary[str, MoELayer] = weakref.WeakValueDictionary()
_lock = threading.Lock()
"""Process-wide, since operators are: names of living layers."""


def register(layer: MoELayer, name: str | None = None) -> str:
    """Give a layer a handle: its name, with "#2" and so on where another living layer has that.

    The same order of registration gives the same handles in every process, so that compiled graphs
    can be cached. The caller keeps the layer alive.
    """
    wanted = name or layer.plan.layer
    with _lock:
        handle, count = wanted, 1
        while _layers.get(handle, layer) is not layer:
            count += 1
            handle = f"{wanted}#{count}"
        _layers[handle] = layer
        return handle


def find(handle: str, plan: str) -> MoELayer:
    """The layer of a handle. Raises BackendError if it is gone, or has another plan now."""
    layer = _layers.get(handle)
    if layer is None:
        raise BackendError(f"layer {handle!r}: no such layer in this process; it was never registered, or is gone")
    if layer.plan.digest != plan:
        raise BackendError(
            f"layer {handle!r}: the graph was made for plan {plan[:8]}, the layer has {layer.plan.digest[:8]}"
        )
    return layer


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, plan: str, layer: str) -> torch.Tensor:
    """x (M, H), ids (M, k), weights (M, k) -> a new (M, H) in x's dtype."""
    return find(layer, plan)(x, ids, weights)


def experts_out(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, plan: str, layer: str, *, out: torch.Tensor
) -> None:
    """The same into `out`, which no input may overlap."""
    find(layer, plan)(x, ids, weights, out)


def experts_fake(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, plan: str, layer: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def experts_out_fake(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, plan: str, layer: str, *, out: torch.Tensor
) -> None:
    return None


for _name, _implementation, _fake in (
    ("experts", experts, experts_fake),
    ("experts_out", experts_out, experts_out_fake),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sm70_moe::{_name}", _fake, lib=_LIBRARY)
