"""The experts of a checkpoint in an engine of your own: python examples/embed_in_your_engine.py FOLDER [DEVICE]."""

from __future__ import annotations

import sys

import torch

import sm70_moe as sm
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.operator import register


def main(folder: str, device: str = "cpu") -> None:
    checkpoint = Checkpoint.open(folder)
    layers: dict[str, sm.MoELayer] = {}
    with sm.AdmissionService() as service:  # settings from the environment, shipped policies, this machine
        for found in checkpoint.layers:
            facts = checkpoint.facts(found, tensor_parallel=1, tensor_rank=0, device=device)
            layer = service.layer(facts, CheckpointSource(checkpoint, found, facts))
            layers[register(layer)] = layer  # a handle for compiled graphs; you keep the layer alive
        print(service.summary())
    for handle, layer in layers.items():
        facts = layer.plan.admission.facts
        x = torch.randn(2, facts.hidden, device=device).half()
        weights, ids = torch.rand(2, facts.experts, device=device).softmax(-1).topk(facts.top_k)
        out = torch.ops.sm70_moe.experts(x, ids, weights, layer.plan.digest, handle)
        print(handle, [route.name for route in layer.plan.routes], f"|out| {out.float().norm():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
