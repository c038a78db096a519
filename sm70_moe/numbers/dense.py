"""Tensors that hold their numbers one by one in memory, and those that do not."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sm70_moe.errors import BackendError


def odd_kind(tensor: torch.Tensor) -> str:
    """ "nested", "quantised", "meta" or the layout of a tensor that is not dense; "" for one that is."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "quantised" if tensor.is_quantized else "meta" if tensor.is_meta else ""


def require_dense(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """BackendError that names the first tensor that is nested, sparse, quantised by torch, or holds nothing."""
    for name, tensor in tensors.items():
        if tensor is not None and (kind := odd_kind(tensor)):
            raise BackendError(f"{name} is a tensor of kind {kind}; accepted are dense ones that hold numbers")
