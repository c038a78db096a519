"""A layer that meets a policy's contract in full: what `doctor` asks about, and where tests start."""

from __future__ import annotations

from typing import Any

from sm70_moe.facts import LayerFacts
from sm70_moe.policy import Policy


def contract_facts(policy: Policy, layer: str = "model.layers.0.mlp.experts", **changes: Any) -> LayerFacts:
    """Facts of a layer just as the contract has it, then changed as told.

    What the contract leaves open is unknown, but for the parallel sizes, which are 1, and the format,
    which is AWQ.
    """
    contract, weights = policy.contract, policy.contract.weights
    ranks = contract.tensor_parallel or 1
    facts: dict[str, Any] = {
        "layer": layer,
        "index": 0,
        "hidden": contract.hidden,
        "intermediate": None if contract.intermediate is None else contract.intermediate * ranks,
        "experts": contract.experts,
        "top_k": contract.top_k,
        "format": weights.format or "awq",
        "packing": weights.packing or "gemm",
        "bits": weights.bits,
        "zero_point": weights.zero_point,
        "checkpoint_group": weights.checkpoint_group,
        "activation": contract.activation,
        "gated": True,
        "bias": False,
        "router_weight_on_input": False,
        "activations": contract.activations,
        "tensor_parallel": ranks,
        "tensor_rank": 0,
        "expert_parallel": contract.expert_parallel or 1,
        "expert_rank": 0,
        "device": "cuda:0",
        "max_sequences": 8,
        "speculative_width": 1,
    }
    return LayerFacts(**{**facts, **changes})
