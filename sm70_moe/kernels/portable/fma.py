"""FP32 fused multiply-add in torch, which has none of its own."""

from __future__ import annotations

import torch


def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` of FP32 tensors with a single rounding to FP32 (nearest, ties to even).

    The product of two FP32 numbers has at most 48 bits, so FP64 holds it exactly. The FP64 sum may
    be inexact; rounding it again to FP32 would round twice. TwoSum (Knuth) gives the error of that
    sum, and with it the sum is rounded *to odd*: of the two FP64 neighbours of the exact value the
    one with an odd last bit is taken. FP64 has more than two bits beyond FP32, also among FP32's
    subnormals, so the last rounding then sees the right side of every tie (Boldo and Melquiond,
    2008). FP64 does not overflow or underflow here: exponents stay within -298 and 256.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    return _to_odd(total, error).float()


def _to_odd(total: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The neighbour with an odd last bit of the exact value `total + error`, if it lies between two."""
    bits = total.view(torch.int64)
    # NaN and infinity have a NaN error and stay; one step of the integer is one step away from zero
    move = torch.isfinite(error) & (error != 0) & ((bits & 1) == 0)
    outward = (error > 0) == (total > 0)
    step = torch.where(outward, 1, -1) * move
    return (bits + step).view(torch.float64)
