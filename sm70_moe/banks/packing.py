"""What an order does with numbers: `Packing`, one object an order, and the arithmetic all orders share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sm70_moe.banks import metadata as group_metadata
from sm70_moe.banks.pairs import fused_words
from sm70_moe.layout import WORDS, Metadata, Order
from sm70_moe.numbers.rowwords import unpack_rows

Planes = Mapping[str, torch.Tensor]
"""Tensors of one bank by the name of their plane."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One order's way between plain matrices and planes; everything takes leading dimensions.

    `put` writes row words (K/8, n) into the columns `first`, `first + step` and so on of a plane;
    `columns` gives a plane's words back as (N, K/8), for the plane and N. `arrange` moves values
    (K/g, N) to where the order has a group's values, `restore` back.
    """

    order: Order
    put: Callable[[torch.Tensor, torch.Tensor, int, int], None]
    columns: Callable[[torch.Tensor, int], torch.Tensor]
    arrange: Callable[[torch.Tensor], torch.Tensor]
    restore: Callable[[torch.Tensor], torch.Tensor]

    def unpack(self, words: torch.Tensor, columns: int) -> torch.Tensor:
        """The plane of words of one matrix -> INT16 codes (N, K)."""
        return unpack_rows(self.columns(words, columns))

    def encode(self, metadata: Metadata, scales: torch.Tensor, zeros: torch.Tensor) -> Planes:
        """FP16 scales and uint8 zeros (K/g, N) -> the values of all planes but the words'."""
        return group_metadata.encode(metadata, self.arrange(scales), self.arrange(zeros), self.order.names(metadata))

    def groups(self, metadata: Metadata, planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
        """FP16 scales and biases, both (K/g, N)."""
        scales, biases = group_metadata.decode(metadata, planes)
        return self.restore(scales), self.restore(biases)

    def zeros(self, metadata: Metadata, planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
        """FP16 scales and uint8 zeros, both (K/g, N); see `metadata.zeros_of`."""
        scales, zeros = group_metadata.zeros_of(metadata, planes)
        return self.restore(scales), self.restore(zeros)

    def dequantise(self, metadata: Metadata, planes: Planes, columns: int) -> torch.Tensor:
        """FP16 weights (N, K) of one matrix, a row for each column."""
        return fused(self.unpack(planes[WORDS], columns), *self.groups(metadata, planes))

    def dequantise_many(self, metadata: Metadata, planes: Planes, columns: int) -> torch.Tensor:
        """FP16 weights (P, N, K) of P matrices, in few passes over memory: what a GPU is asked for."""
        words, (scale, bias) = self.columns(planes[WORDS], columns), self.groups(metadata, planes)
        if words.shape[-1] % scale.shape[-2]:  # a group that is no whole number of words
            return torch.stack([fused(unpack_rows(w), s, b) for w, s, b in zip(words, scale, bias, strict=True)])
        return fused_words(words, scale, bias)


def fused(codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Weights FP16 (N, K), round16(q * scale + bias) in one rounding (CONTRACT 8.2).

    codes are (N, K), scale and bias FP16 (K/g, N). The product and the sum are exact in FP32, so
    the only rounding is the last one, as in a fused half multiply-add: let u be the unit in the
    last place of `scale` (at least 2^-24). q * scale is a multiple of u below 15 * 2^11 u. bias is
    half(-zero * scale): the product is such a multiple too, and rounding it to 11 bits keeps it
    one. The sum stays below 2^16 u, and FP32 holds multiples of u up to 2^24 u; none of them is
    subnormal in FP32.
    """
    groups, columns = scale.shape
    weights = codes.to(torch.float32).view(columns, groups, -1)
    weights.mul_(scale.t().float().unsqueeze(-1)).add_(bias.t().float().unsqueeze(-1))
    return weights.to(torch.float16).flatten(1)
