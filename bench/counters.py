"""Calls for a profiler: each decode kernel of the first contract, cold, on random experts of a whole bank.

    ncu --section SpeedOfLight --section WarpStateStats --section Occupancy --section LaunchStats \\
        --kernel-name regex:'w13|w2_|fused' --csv --page raw python bench/counters.py [3-byte|2.5-byte]

The installed build is launched as a layer launches it, without overlap (a profiler serialises kernels).
"""

from __future__ import annotations

import sys

import torch

from sm70_moe.benchmark.weights import random_banks
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata

SHAPE, TOP_K, DEVICE = BankShape(512, 2560, 160), 10, "cuda:0"


def main() -> None:
    metadata = Metadata(sys.argv[1]) if len(sys.argv) > 1 else Metadata.FOUR_BYTE
    layout = BankLayout("octet32", metadata, group=32, interleaved=True, batched=True)
    banks = random_banks(layout, SHAPE, DEVICE, seed=1)
    source = torch.Generator(DEVICE).manual_seed(2)
    fused = NativeBackend("qpn").configured(None, True, fused=True)
    for tokens in (1, 2, 4, 8):
        x = torch.randn(tokens, SHAPE.hidden, generator=source, device=DEVICE).half()
        ids = torch.stack([torch.randperm(SHAPE.experts, generator=source, device=DEVICE)[:TOP_K] for _ in x]).int()
        weights = torch.rand(tokens, TOP_K, generator=source, device=DEVICE)
        for backend in (NativeBackend("grouped"),) if tokens > 1 else (NativeBackend("qpn"), fused):
            backend.run(banks, Call(x, ids, weights, torch.empty_like(x)))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
