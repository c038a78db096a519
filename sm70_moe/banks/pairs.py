"""Weights of many matrices at once, two rows at a time: what a GPU is asked for.

Halves of a word hold the even and the odd rows of eight, so that a masked word, taken as two numbers of 16 bits, is
two neighbouring rows. On a GPU torch compiles one elementwise kernel for it, with a real fused half multiply-add;
where it cannot, and on a CPU, a few of torch's own operations give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

PAIR = 0x000F000F
"""What is left of a word for two codes, of rows 2n and 2n + 1; four bits on stand those of the next two rows."""

KERNEL = """
template <typename T> T weights_of(T word, T shift, T group) {
    const unsigned one = 0x64006400u;  // 1024 in both halves: a code beneath it is 1024 + code
    unsigned codes = ((unsigned)word >> shift & 0x000F000Fu) | one, found;
    unsigned scale = ((unsigned)group & 0xFFFFu) * 0x10001u, bias = ((unsigned)group >> 16) * 0x10001u;
    asm("{ .reg .b32 exact; sub.f16x2 exact, %1, %4; fma.rn.f16x2 %0, exact, %2, %3; }"
        : "=r"(found) : "r"(codes), "r"(scale), "r"(bias), "r"(one));
    return (T)found;
}
"""


def fused_words(words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """FP16 weights (P, N, K), round16(q * scale + bias) in one rounding (CONTRACT 8.2), as `packing.fused` has them.

    Row words (P, N, K/8); scale and bias FP16 (P, K/g, N), g a multiple of 8. Nothing waits for the device.
    """
    count, columns, rows = words.shape[0], words.shape[1], words.shape[2] * 8
    groups = scale.shape[1]
    words = words.reshape(count, columns, groups, -1, 1)
    shifts = 4 * torch.arange(4, device=words.device, dtype=torch.int32)  # made there: a graph can capture that
    both = torch.stack((scale.transpose(1, 2), bias.transpose(1, 2)), dim=-1)  # (P, N, K/g, 2)
    weights = compiled(words, shifts, both) if words.is_cuda else None
    return (composed(words, shifts, both) if weights is None else weights).view(count, columns, rows)


def composed(words: torch.Tensor, shifts: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """In torch's operations: code times scale plus bias is exact in FP32 (`packing.fused`), and rounded once."""
    codes = ((words >> shifts) & PAIR).view(torch.int16).to(torch.float16)
    scale, bias = (part.contiguous().view(*codes.shape[:3], 1, 1) for part in both.unbind(-1))
    if codes.is_cuda:
        return torch.addcmul(bias, codes, scale)  # FP32 inside
    return codes.float().mul_(scale.float()).add_(bias.float()).to(torch.float16)


def compiled(words: torch.Tensor, shifts: torch.Tensor, both: torch.Tensor) -> torch.Tensor | None:
    """In one kernel; None where this torch cannot make it."""
    kernel = elementwise()
    if kernel is None:
        return None
    try:
        found: torch.Tensor = kernel(words, shifts, both.view(torch.int32).unsqueeze(-1))
    except RuntimeError:  # no compiler for this device, say: torch's own operations are slower, not wrong
        elementwise.cache_clear()
        return None
    return found.view(torch.float16)


@cache
def elementwise() -> Callable[..., torch.Tensor] | None:
    """The kernel, which is compiled at its first call on a device."""
    try:
        from torch.cuda.jiterator import _create_jit_fn

        made: Callable[..., torch.Tensor] = _create_jit_fn(KERNEL)
    except (ImportError, RuntimeError):
        return None
    return made
