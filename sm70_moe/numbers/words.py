"""Eight 4-bit values in a 32-bit word, in any order of nibbles.

Many words are taken apart as bytes: a byte is unsigned, so the sign of an INT32 word cannot leak into
its last nibble, and byte operations move a quarter of the memory. Needs a little-endian machine,
as torch on x86, ARM and CUDA is.
"""

from __future__ import annotations

from functools import cache

import torch

from sm70_moe.numbers.formats import VALUES, Order

__all__ = ["VALUES", "Order", "pack", "unpack"]

FEW = 2**14
"""Words on the host up to which three operations on INT32 are quicker than a dozen on bytes: what a proof reads."""


def unpack(words: torch.Tensor, order: Order, dim: int = -1) -> torch.Tensor:
    """INT32 words -> uint8 in 0..15, eight times as long in `dim`, the dimension that was packed."""
    place = dim % words.dim()
    if words.device.type == "cpu" and words.numel() <= FEW:
        bits = _bits(order).view(VALUES, *(1,) * (words.dim() - place - 1))
        # an arithmetic shift brings in the sign, which the mask takes away again
        return ((words.unsqueeze(place + 1) >> bits) & 15).to(torch.uint8).flatten(place, place + 1)
    octets = words.contiguous().view(torch.uint8).view(*words.shape, VALUES // 2)
    shape = (*words.shape[: place + 1], VALUES, *words.shape[place + 1 :])
    values = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for value, nibble in enumerate(order):
        octet, out = octets[..., nibble // 2], values.select(place + 1, value)
        if nibble % 2:
            torch.bitwise_right_shift(octet, 4, out=out)
        else:
            torch.bitwise_and(octet, 15, out=out)
    return values.flatten(place, place + 1)


@cache
def _bits(order: Order) -> torch.Tensor:
    """Bits below each value of a word."""
    return torch.tensor([4 * nibble for nibble in order], dtype=torch.int32)


def pack(values: torch.Tensor, order: Order) -> torch.Tensor:
    """uint8 (..., 8) in 0..15 -> INT32 (...). The input may have any strides."""
    octets = torch.empty(*values.shape[:-1], VALUES // 2, dtype=torch.uint8, device=values.device)
    for octet in range(VALUES // 2):
        low, high = order.index(2 * octet), order.index(2 * octet + 1)
        octets[..., octet] = values[..., low] | (values[..., high] << 4)
    return octets.view(torch.int32).squeeze(-1)
