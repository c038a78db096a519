"""AWQ's `gemm` packing: words of eight neighbouring output columns (CONTRACT 6)."""

from __future__ import annotations

import torch

from sm70_moe.errors import CheckpointError
from sm70_moe.weights.codes import Codes
from sm70_moe.weights.words import VALUES, Order, pack, unpack

WEIGHT_ORDER: Order = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of columns 0..7 in a word of `qweight`."""

ZERO_ORDER: Order = (0, 4, 1, 5, 2, 6, 3, 7)
"""The same for `qzeros`. Equal today, but a fact of its own: decoders elsewhere got only one right."""

SYMMETRIC_ZERO = 8
"""What a checkpoint without zeros means: codes 0..15 stand for -8..7."""


def unpack_weights(qweight: torch.Tensor) -> torch.Tensor:
    """INT32 (K, N/8) -> uint8 codes (K, N)."""
    return unpack(qweight, WEIGHT_ORDER)


def unpack_zeros(qzeros: torch.Tensor) -> torch.Tensor:
    """INT32 (K/g, N/8) -> uint8 zeros (K/g, N). Nothing is added: AWQ stores zeros as they are."""
    return unpack(qzeros, ZERO_ORDER)


def pack_weights(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (K, N) -> INT32 (K, N/8)."""
    return pack(codes.reshape(codes.shape[0], -1, VALUES), WEIGHT_ORDER)


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 zeros (K/g, N) -> INT32 (K/g, N/8)."""
    return pack(zeros.reshape(zeros.shape[0], -1, VALUES), ZERO_ORDER)


def decode(qweight: torch.Tensor, qzeros: torch.Tensor | None, scales: torch.Tensor, groups: tuple[int, ...]) -> Codes:
    """One matrix's codes, with row j of zeros and scales taken from row `groups[j]` of the source.

    qweight INT32 (K, N/8), qzeros INT32 (G, N/8) or None, scales FP16 (G, N). Raises
    CheckpointError for another dtype: scales that were rounded to it are not the checkpoint's.
    """
    for name, tensor, dtype in (
        ("qweight", qweight, torch.int32),
        ("qzeros", qzeros, torch.int32),
        ("scales", scales, torch.float16),
    ):
        if tensor is not None and tensor.dtype is not dtype:
            raise CheckpointError(f"{name} are {tensor.dtype}; accepted is {dtype}")
    rows = torch.tensor(groups, device=scales.device)
    zeros = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8) if qzeros is None else unpack_zeros(qzeros)
    return Codes(unpack_weights(qweight), zeros[rows], scales[rows])
