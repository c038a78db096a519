"""SwiGLU with the contract's rounding points, on any device."""

from __future__ import annotations

import torch


def activate(both: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """silu(gate) * up for both (..., 2I): silu in FP32, rounded; the product rounded to both's dtype."""
    middle = both.shape[-1] // 2
    gate = both[..., 0::2] if interleaved else both[..., :middle]
    up = both[..., 1::2] if interleaved else both[..., middle:]
    return (silu(gate.float()).to(both.dtype).float() * up.float()).to(both.dtype)


def silu(gate: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) in FP32.

    On a CPU torch's own FP32 exp differs in the last bit between its vector loop and the loop's remainder,
    so a value would depend on its place in the tensor. The FP64 one, rounded to FP32, does not.
    """
    exp = torch.exp(-gate) if gate.is_cuda else torch.exp(-gate.double()).float()
    return gate / (1 + exp)
