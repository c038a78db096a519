"""Ranks that share a layer: each loads its slice, all agree on the plan, run, and add up.

    torchrun --nproc-per-node=4 examples/tensor_parallel.py FOLDER

On GPUs each rank takes its own and NCCL adds up; else CPU and gloo. Rank 0 also runs the whole layer
alone and prints how far the sum is from it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import sm70_moe as sm
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.reading.source import CheckpointSource


def build(folder: str, ranks: int, rank: int, device: str, group: dist.ProcessGroup | None) -> sm.MoELayer:
    """This rank's share of the first layer; with a group, on a plan that all its ranks have agreed on."""
    checkpoint = Checkpoint.open(folder)
    found = checkpoint.layers[0]
    facts = checkpoint.facts(found, tensor_parallel=ranks, tensor_rank=rank, device=device)
    service = sm.AdmissionService(rank=rank)
    service.admit(facts)
    if group is not None:
        service.agree(group)
    return service.layer(facts, CheckpointSource(checkpoint, found, facts))


def main(folder: str) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    layer = build(folder, ranks, rank, device, dist.group.WORLD)
    facts = layer.plan.admission.facts
    source = torch.Generator().manual_seed(1)  # every rank makes the same call
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, facts.hidden, generator=source).half().to(device)
        scores = torch.rand(tokens, facts.experts, generator=source).softmax(-1).to(device)
        weights, ids = scores.topk(facts.top_k)
        share = layer(x, ids, weights).float()
        dist.all_reduce(share)
        if rank == 0:
            alone = build(folder, 1, 0, device, None)(x, ids, weights).float()
            print(f"{tokens} tokens: largest difference {(share - alone).abs().max():.2e} of {alone.abs().max():.2e}")
    if rank == 0:
        print("routes", [route.name for route in layer.plan.routes], "plan", layer.plan.digest[:8])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
