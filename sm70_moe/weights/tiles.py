"""The reference order of prepared weights, "tile32x8" (CONTRACT 7).

Tiles of 32 columns x 8 rows of K: word (n div 32, k div 8, n mod 32) holds eight consecutive K of
one column, as an INT32 tensor (N/32, K/8, 32). N is filled up to whole tiles with zero codes.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from sm70_moe.layout import TILE_COLUMNS, WORD_ROWS
from sm70_moe.weights.words import Order
from sm70_moe.weights.words import pack as pack_words

ORDER = "tile32x8"

ROW_ORDER: Order = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of rows k mod 8 = 0..7: ((k & 1) << 2) + (k >> 1)."""

PAIR_MASK = 0x000F000F


def tile_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Shape of the words of a matrix with K = `rows` and N = `columns`."""
    return -(-columns // TILE_COLUMNS), rows // WORD_ROWS, TILE_COLUMNS


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (K, N) -> INT32 words (N/32, K/8, 32). K must divide by 8."""
    rows, columns = codes.shape
    tiles, words, width = tile_shape(rows, columns)
    if tiles * width > columns:
        codes = pad(codes, (0, tiles * width - columns))
    # (K/8, 8, N/32, 32) -> (N/32, K/8, 32, 8), a view: packing reads it with strides
    by_word = codes.view(words, WORD_ROWS, tiles, width).permute(2, 0, 3, 1)
    return pack_words(by_word, ROW_ORDER)


def unpack(words: torch.Tensor, columns: int) -> torch.Tensor:
    """INT32 words (N/32, K/8, 32) -> INT16 codes (N, K), one column after the other.

    Nibbles i and i + 4 hold rows 2i and 2i + 1, so a shift by 4i and one mask give two neighbours
    as the halves of a 32-bit value: four operations instead of eight.
    """
    by_column = words.transpose(1, 2).flatten(0, 1)[:columns]
    pairs = torch.empty(*by_column.shape, WORD_ROWS // 2, dtype=torch.int32, device=words.device)
    for pair in range(WORD_ROWS // 2):
        torch.bitwise_right_shift(by_column, 4 * pair, out=pairs[..., pair])
    return pairs.bitwise_and_(PAIR_MASK).view(torch.int16).flatten(1)


def dequantise(words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Weights FP16 (N, K), round16(q * scale + bias) in one rounding (CONTRACT 8.2).

    scale and bias are FP16 (K/g, N). The product and the sum are exact in FP32, so the only
    rounding is the last one, as in a fused half multiply-add: let u be the unit in the last place
    of `scale` (at least 2^-24). q * scale is a multiple of u below 15 * 2^11 u. bias is
    half(-zero * scale): the product is such a multiple too, and rounding it to 11 bits keeps it
    one. The sum stays below 2^16 u, and FP32 holds multiples of u up to 2^24 u; none of them is
    subnormal in FP32.
    """
    groups, columns = scale.shape
    weights = unpack(words, columns).to(torch.float32).view(columns, groups, -1)
    weights.mul_(scale.t().float().unsqueeze(-1)).add_(bias.t().float().unsqueeze(-1))
    return weights.to(torch.float16).flatten(1)
