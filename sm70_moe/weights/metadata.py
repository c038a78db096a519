"""Scales and zeros of prepared banks in four or three bytes (CONTRACT 7); both decode to the same bits."""

from __future__ import annotations

import torch

from sm70_moe.layout import Metadata

DTYPES = {Metadata.FOUR_BYTE: torch.int32, Metadata.THREE_BYTE: torch.uint8}


def metadata_shape(metadata: Metadata, groups: int, columns: int) -> tuple[int, ...]:
    """Shape of a matrix's metadata: INT32 (K/g, N), or uint8 (K/g, N, 3)."""
    return (groups, columns, 3) if metadata is Metadata.THREE_BYTE else (groups, columns)


def bias(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """FP16 bias half(-zero * scale): exact in FP32, rounded once (CONTRACT 8.1).

    The negation is of the floating-point zero, so zero 0 under a positive scale gives -0.0.
    """
    return (-zero.float() * scale.float()).half()


def encode(metadata: Metadata, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """FP16 scales and uint8 zeros, both (K/g, N), as stored."""
    if metadata is Metadata.FOUR_BYTE:
        return torch.stack((scale, bias(scale, zero)), dim=-1).view(torch.int32).squeeze(-1)
    return torch.cat((scale.contiguous().unsqueeze(-1).view(torch.uint8), zero.unsqueeze(-1)), dim=-1)


def decode(metadata: Metadata, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored metadata as (scale, bias), both FP16 (K/g, N)."""
    if metadata is Metadata.FOUR_BYTE:
        halves = stored.unsqueeze(-1).view(torch.float16)
        return halves[..., 0], halves[..., 1]
    scale = stored[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return scale, bias(scale, stored[..., 2])
