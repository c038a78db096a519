"""The reference order of prepared weights, "tile32x8" (CONTRACT 7).

Tiles of 32 columns x 8 rows of K: word (n div 32, k div 8, n mod 32) holds eight consecutive K of
one column, as an INT32 tensor (N/32, K/8, 32). N is filled up to whole tiles with zero codes.
Groups stand as (K/g, N).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from sm70_moe.banks.packing import Packing
from sm70_moe.layout import TILE32X8, TILE_COLUMNS


def put(words: torch.Tensor, plane: torch.Tensor, first: int, step: int) -> None:
    """Row words (..., K/8, n) into columns `first`, `first + step`, ... of (..., N/32, K/8, 32), N filled up
    with zeros.
    """
    width = TILE_COLUMNS // step
    if words.shape[-1] % width:
        words = pad(words, (0, -words.shape[-1] % width))
    plane[..., first::step].copy_(words.view(*words.shape[:-1], -1, width).transpose(-3, -2))


def columns(words: torch.Tensor, count: int) -> torch.Tensor:
    """Words (..., N/32, K/8, 32) -> (..., N, K/8) of the first `count` columns."""
    return words.transpose(-2, -1).flatten(-3, -2)[..., :count, :]


def arrange(groups: torch.Tensor) -> torch.Tensor:
    """Values (..., K/g, N) as the order has them: just so."""
    return groups


PACKING = Packing(TILE32X8, put, columns, arrange, arrange)
