"""Scales and zeros of prepared banks in 4, 3 or 2.5 bytes each (CONTRACT 7); all decode to the same bits.

Which planes hold them, and in which shape, is the order's matter: these functions work on values as
the order has arranged them, the columns of a word last.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from sm70_moe.errors import BackendError
from sm70_moe.layout import METADATA, OCTET, SCALES, ZEROS, Metadata
from sm70_moe.numbers.words import Order as Nibbles
from sm70_moe.numbers.words import pack, unpack

ZERO_ORDER: Nibbles = (0, 1, 2, 3, 4, 5, 6, 7)
"""Nibble of the zeros of columns 0..7 in a 2.5-byte word."""

LARGEST_ZERO = 15


def bias(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """FP16 bias half(-zero * scale): exact in FP32, rounded once (CONTRACT 8.1).

    The negation is of the floating-point zero, so zero 0 under a positive scale gives -0.0.
    """
    return (-zero.float() * scale.float()).half()


def encode(
    metadata: Metadata, scale: torch.Tensor, zero: torch.Tensor, names: frozenset[str]
) -> dict[str, torch.Tensor]:
    """FP16 scales and uint8 zeros of one shape -> the planes that hold them.

    `names` are the order's planes: three bytes stand together in one, or apart in two.
    """
    if metadata is Metadata.FOUR_BYTE:
        return {METADATA: torch.stack((scale, bias(scale, zero)), dim=-1).view(torch.int32).squeeze(-1)}
    if metadata is Metadata.TWO_AND_HALF_BYTE:
        return {SCALES: scale, ZEROS: pack_zeros(zero)}
    if METADATA not in names:
        return {SCALES: scale, ZEROS: zero}
    return {METADATA: torch.cat((scale.contiguous().unsqueeze(-1).view(torch.uint8), zero.unsqueeze(-1)), dim=-1)}


def decode(metadata: Metadata, planes: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Planes as (scale, bias), both FP16."""
    if metadata is Metadata.FOUR_BYTE:
        halves = planes[METADATA].unsqueeze(-1).view(torch.float16)
        return halves[..., 0], halves[..., 1]
    scale, zero = zeros_of(metadata, planes)
    return scale, bias(scale, zero)


def zeros_of(metadata: Metadata, planes: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Planes as (FP16 scale, uint8 zero).

    Four bytes do not hold the zero itself: it is the smallest one that gives the stored bias, so it
    is another one than was stored only where that changes no bit of any weight (a scale of 0, a
    bias that overflows). Raises BackendError for a bias that no zero gives.
    """
    if metadata is Metadata.FOUR_BYTE:
        return _zeros_of_bias(*decode(metadata, planes))
    if METADATA not in planes:
        zeros, scales = planes[ZEROS], planes[SCALES]
        if metadata is Metadata.TWO_AND_HALF_BYTE:
            zeros = unpack_zeros(zeros.reshape(*scales.shape[:-1], -1), scales.shape[-1])
        return scales, zeros
    stored = planes[METADATA]
    return stored[..., :2].contiguous().view(torch.float16).squeeze(-1), stored[..., 2]


def _zeros_of_bias(scale: torch.Tensor, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    zeros = torch.full_like(scale, LARGEST_ZERO + 1, dtype=torch.uint8)
    wanted = stored.contiguous().view(torch.int16)
    for zero in range(LARGEST_ZERO, -1, -1):
        given = bias(scale, torch.full_like(zeros, zero)).view(torch.int16)
        zeros.masked_fill_(given == wanted, zero)
    if bool((zeros > LARGEST_ZERO).any()):
        place = int((zeros > LARGEST_ZERO).flatten().nonzero()[0])
        raise BackendError(
            f"metadata {place}: scale {scale.flatten()[place].item()} with bias {stored.flatten()[place].item()}; "
            f"accepted is the bias of a zero from 0 to {LARGEST_ZERO}"
        )
    return scale, zeros


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 zeros (..., N) -> INT32 (..., N/8), column c of eight in nibble c; filled up with zeros."""
    short = -zeros.shape[-1] % OCTET
    whole = pad(zeros, (0, short)) if short else zeros
    return pack(whole.reshape(*whole.shape[:-1], -1, OCTET), ZERO_ORDER)


def unpack_zeros(words: torch.Tensor, columns: int) -> torch.Tensor:
    """INT32 (..., N/8) -> uint8 zeros (..., N), N = `columns`."""
    return unpack(words, ZERO_ORDER)[..., :columns]
