"""Banks with random weights, made where they lie: a checkpoint's worth would take the host minutes."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from sm70_moe.banks.banks import Bank, Banks, allocate
from sm70_moe.benchmark.traffic import bank_bytes, stand_in_bytes
from sm70_moe.errors import BackendError
from sm70_moe.layout import WORDS, BankLayout, BankShape
from sm70_moe.record.explanation import size_text
from sm70_moe.reference.arithmetic import AwqExpert, CodedMatrix, Reference

MOST_BANKS, LEAST_BANKS = 12, 2
"""Twelve banks of the first contract are 4.7 GB: more do not change what is measured. One would be a cache's."""

HEADROOM = 1 << 30
"""Bytes left free: temporaries of filling a bank, scratch of every route, graphs."""

AT_ONCE = 32
"""Experts that are filled at once, so that temporaries stay small."""

SPREAD = 6.5
"""Standard deviation of code minus zero, both spread evenly over 0..15."""


def how_many(free: int, layout: BankLayout, shape: BankShape, asked: int | None = None) -> int:
    """Banks for `free` bytes: as many as asked for, else as many as fit, at most MOST_BANKS.

    Raises BackendError that says what is free and what is needed.
    """
    each = bank_bytes(layout, shape) + stand_in_bytes(layout, shape)
    fitting = max(0, free - HEADROOM) // each
    wanted = LEAST_BANKS if asked is None else asked
    if fitting < wanted:
        raise BackendError(
            f"{size_text(free)} of the GPU's memory are free; {wanted} banks of {size_text(each)} and "
            f"{size_text(HEADROOM)} for everything else are needed: {size_text(wanted * each + HEADROOM)}"
        )
    return min(MOST_BANKS, fitting) if asked is None else asked


def random_banks(layout: BankLayout, shape: BankShape, device: str, seed: int) -> Banks:
    """Banks of random codes, zeros and scales; weights have the standard deviation 1/sqrt(K), one scale in
    eight is negative. The same seed gives the same banks on the same kind of device."""
    made = allocate(layout, shape, device)
    source = torch.Generator(made.device).manual_seed(seed)
    for bank in (made.w13, made.w2):
        for first in range(0, shape.experts, AT_ONCE):
            fill(bank, range(first, min(first + AT_ONCE, shape.experts)), layout, source)
    made.filled.update(range(shape.experts))
    return made


def fill(bank: Bank, experts: range, layout: BankLayout, source: torch.Generator) -> None:
    """Draw neighbouring experts of a batched bank."""
    planes, device = bank.run(experts), source.device
    groups = (len(experts), bank.rows // layout.group, bank.columns)
    words = planes[WORDS]
    words.copy_(torch.randint(-(2**31), 2**31, words.shape, generator=source, device=device, dtype=torch.int32))
    size = (torch.rand(groups, generator=source, device=device) + 0.5) / (SPREAD * bank.rows**0.5)
    negative = torch.rand(groups, generator=source, device=device) < 0.125
    scales = torch.where(negative, -size, size).half()
    zeros = torch.randint(0, 16, groups, generator=source, device=device, dtype=torch.uint8)
    for name, values in bank.packing.encode(bank.stored, scales, zeros).items():
        planes[name].copy_(values.reshape(planes[name].shape))


def reference_of(banks: Banks) -> Reference:
    """The FP64 reference of the numbers that banks hold. An expert is unpacked once and kept."""

    @cache
    def read(expert: int) -> AwqExpert:
        both, inner = numbers(banks.w13, expert, banks.layout.group), banks.shape.intermediate
        interleaved = banks.layout.interleaved
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(inner), slice(inner, None))
        return AwqExpert(columns(both, gate), columns(both, up), numbers(banks.w2, expert, banks.layout.group))

    return Reference(read, banks.shape.experts)


def numbers(bank: Bank, expert: int, group: int) -> CodedMatrix:
    """One matrix as plain numbers."""
    planes = {name: plane.cpu() for name, plane in bank.of(expert).items()}
    codes = bank.packing.unpack(planes[WORDS], bank.columns).t().contiguous().numpy().astype(np.uint8)
    scales, zeros = bank.packing.zeros(bank.stored, planes)
    return CodedMatrix(codes, zeros.contiguous().numpy(), scales.contiguous().numpy(), np.arange(bank.rows) // group)


def columns(matrix: CodedMatrix, chosen: slice) -> CodedMatrix:
    """Some columns of a matrix."""
    codes, zeros, scales = (np.ascontiguousarray(a[:, chosen]) for a in (matrix.codes, matrix.zeros, matrix.scales))
    return CodedMatrix(codes, zeros, scales, matrix.groups)
