"""How many blocks of a kernel a multiprocessor holds at once."""

from __future__ import annotations

from sm70_moe.prediction.hardware import Gpu

REGISTER_UNIT = 8
"""Registers of a thread are given out in eights."""

SHARED_UNIT = 256
"""Bytes: shared memory of a block is given out in these."""


def resident_blocks(gpu: Gpu, threads: int, registers: int, shared: int) -> int:
    """Blocks of `threads`, with `registers` a thread and `shared` bytes, on one multiprocessor; at least 1."""
    warps = -(-threads // 32)
    each = -(-max(registers, 1) // REGISTER_UNIT) * REGISTER_UNIT * 32
    held = gpu.registers // gpu.schedulers // each * gpu.schedulers  # each scheduler has its own file
    limits = [gpu.blocks, min(gpu.warps, held) // warps]
    if shared:
        limits.append(gpu.shared // (-(-shared // SHARED_UNIT) * SHARED_UNIT))
    return max(1, min(limits))
