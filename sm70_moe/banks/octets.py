"""The order "octet32": 16 bytes hold 32 consecutive K of one column, eight columns side by side.

Words are INT32 (N/8, K/32, 8, 4): octet o, block b and column c have four words, rows 32b to
32b + 31 of column 8o + c. A block of an octet is one 128-byte line, and one 16-byte load gives a
thread all codes of a column's group of 32. Groups stand as (N/8, K/g, 8), beside their octet.
"""

from __future__ import annotations

import torch

from sm70_moe.banks.packing import Packing
from sm70_moe.layout import BLOCK_ROWS, OCTET, OCTET32, WORD_ROWS

BLOCK_WORDS = BLOCK_ROWS // WORD_ROWS


def put(words: torch.Tensor, plane: torch.Tensor, first: int, step: int) -> None:
    """Row words (..., K/8, n) into columns `first`, `first + step`, ... of (..., N/8, K/32, 8, 4)."""
    *leading, rows, _ = words.shape
    by_block = words.view(*leading, rows // BLOCK_WORDS, BLOCK_WORDS, -1, OCTET // step)
    # (..., K/32, 4, n/w, w) -> (..., n/w, K/32, w, 4)
    plane[..., first::step, :].copy_(by_block.movedim((-2, -1), (-4, -2)))


def columns(words: torch.Tensor, count: int) -> torch.Tensor:
    """Words (..., N/8, K/32, 8, 4) -> (..., N, K/8); N = `count`."""
    return words.transpose(-3, -2).reshape(*words.shape[:-4], count, -1)


def arrange(groups: torch.Tensor) -> torch.Tensor:
    """Values (..., K/g, N) -> (..., N/8, K/g, 8)."""
    return groups.reshape(*groups.shape[:-1], -1, OCTET).transpose(-3, -2)


def restore(groups: torch.Tensor) -> torch.Tensor:
    """Values (..., N/8, K/g, 8) -> (..., K/g, N)."""
    return groups.transpose(-3, -2).flatten(-2)


PACKING = Packing(OCTET32, put, columns, arrange, restore)
