"""Row words: eight consecutive K of one column in a 32-bit word, as every order of prepared banks has them.

Files that pack along N are turned into them without unpacking: a word of eight columns and a word of
eight rows hold the same 64 nibbles of an 8 x 8 block, transposed.
"""

from __future__ import annotations

from typing import Any

import torch

from sm70_moe.layout import WORD_ROWS
from sm70_moe.numbers.words import Order as Nibbles
from sm70_moe.numbers.words import pack

ROW_ORDER: Nibbles = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of rows k mod 8 = 0..7: ((k & 1) << 2) + (k >> 1)."""

PAIR_MASK = 0x000F000F

SWAPS = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))
"""Steps of a transposition: words this far apart swap nibbles this far apart, the upper ones of the
first (shifted down, under the mask) for the lower ones of the second."""

NIBBLE = 4


def row_words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (..., K, N) -> INT32 (..., K/8, N). K must divide by 8."""
    *leading, rows, columns = codes.shape
    return pack(codes.reshape(*leading, rows // WORD_ROWS, WORD_ROWS, columns).movedim(-2, -1), ROW_ORDER)


def unpack_rows(by_column: torch.Tensor) -> torch.Tensor:
    """INT32 words (N, K/8), a row for each column -> INT16 codes (N, K).

    Nibbles i and i + 4 hold rows 2i and 2i + 1, so a shift by 4i and one mask give two neighbours
    as the halves of a 32-bit value: four operations instead of eight.
    """
    pairs = torch.empty(*by_column.shape, WORD_ROWS // 2, dtype=torch.int32, device=by_column.device)
    for pair in range(WORD_ROWS // 2):
        torch.bitwise_right_shift(by_column, NIBBLE * pair, out=pairs[..., pair])
    return pairs.bitwise_and_(PAIR_MASK).view(torch.int16).flatten(1)


def transposed(words: torch.Tensor, order: Nibbles) -> torch.Tensor:
    """INT32 (..., K, N/8), eight columns in a word in this order -> row words (..., K/8, N).

    Row k of eight goes to place ROW_ORDER[k] of the buffer; after the transposition place p holds
    the words of the columns whose nibble was p.
    """
    *leading, rows, width = words.shape
    eights = words.view(*leading, rows // WORD_ROWS, WORD_ROWS, width)
    places = torch.stack([eights[..., ROW_ORDER.index(place), :] for place in range(WORD_ROWS)])
    # numpy works on the same memory and is a third faster in these loops
    swap(places.numpy() if places.device.type == "cpu" else places)
    return torch.stack([places[nibble] for nibble in order], dim=-1).flatten(-2)


def swap(places: Any) -> None:
    """Transpose 8 x 8 nibbles in place: an array or tensor (8, ...) of words, 18 operations on half of it each."""
    for apart, mask in SWAPS:
        shift = NIBBLE * apart
        halves = places.reshape(WORD_ROWS // (2 * apart), 2, apart, -1)
        first, second = halves[:, 0], halves[:, 1]
        moved = first >> shift
        moved ^= second
        moved &= mask
        second ^= moved
        moved <<= shift
        first ^= moved


def reordered(words: torch.Tensor, order: Nibbles) -> torch.Tensor:
    """INT32 words of eight rows in this order -> row words of the same shape.

    Nibbles that move equally far move together.
    """
    masks: dict[int, int] = {}
    for source, target in zip(order, ROW_ORDER, strict=True):
        masks[target - source] = masks.get(target - source, 0) | 15 << NIBBLE * target
    found = torch.zeros_like(words)
    for distance, mask in masks.items():
        shift = NIBBLE * abs(distance)
        moved = words << shift if distance > 0 else words >> shift
        # the mask drops the copies of the sign that `>>` shifts in
        found.bitwise_or_(moved.bitwise_and_(mask - (mask >> 31 << 32)))
    return found
