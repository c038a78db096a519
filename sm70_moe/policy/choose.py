"""Choosing: which policy speaks about a layer."""

from __future__ import annotations

from collections.abc import Iterable

from sm70_moe.errors import PolicyError
from sm70_moe.facts import LayerFacts
from sm70_moe.policy.contract import Contract
from sm70_moe.policy.document import Policy


def choose_policy(policies: Iterable[Policy], facts: LayerFacts) -> Policy:
    """The policy for the model that this layer belongs to, else the generic one.

    A single policy is the operator's choice and speaks about every layer. Of several, one fits a
    model by hidden size, experts, top-k and whole intermediate size, all given and equal; if more
    than one fits: same tensor parallelism, then same checkpoint group, then fewest other
    differences, then the name. A near miss is left to admission, which says what does not hold.
    Raises PolicyError if nothing fits and no policy is generic.
    """
    listed = sorted(policies, key=lambda policy: policy.name)
    if len(listed) == 1:
        return listed[0]
    fitting = [policy for policy in listed if fits_model(policy.contract, facts)]
    if fitting:
        return min(fitting, key=lambda policy: distance(policy.contract, facts))
    for policy in listed:
        if policy.contract.any_geometry:
            return policy
    names = ", ".join(policy.name for policy in listed) or "no policies"
    raise PolicyError([f"layer {facts.layer}: found {names}, accepted one that fits the layer, or a generic one"])


def fits_model(contract: Contract, facts: LayerFacts) -> bool:
    """Are the four sizes of the model known, and the contract's own?"""
    if contract.tensor_parallel is None:
        intermediate = (contract.intermediate, facts.intermediate_per_rank)
    else:
        intermediate = (contract.whole_intermediate, facts.intermediate)
    sizes = (
        (contract.hidden, facts.hidden),
        (contract.experts, facts.experts),
        (contract.top_k, facts.top_k),
        intermediate,
    )
    return all(expected is not None and expected == observed for expected, observed in sizes)


def distance(contract: Contract, facts: LayerFacts) -> tuple[int, int, int]:
    """How far a layer is from the contract of its own model; smaller is closer."""
    weights = contract.weights
    others = (
        (contract.expert_parallel, facts.expert_parallel),
        (contract.activation, facts.activation),
        (contract.activations, facts.activations),
        (weights.format, facts.format),
        (weights.packing, facts.packing),
        (weights.bits, facts.bits),
        (weights.zero_point, facts.zero_point),
    )
    return (
        step(contract.tensor_parallel, facts.tensor_parallel),
        step(weights.checkpoint_group, facts.checkpoint_group),
        sum(step(expected, observed) == 2 for expected, observed in others),
    )


def step(expected: object, observed: object) -> int:
    """0 for the same value, 1 where the contract leaves it open, 2 for another or an unknown one."""
    if expected is None:
        return 1
    return 0 if expected == observed else 2
