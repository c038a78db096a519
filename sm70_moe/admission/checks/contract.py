"""A layer against a policy's contract: each fact that a feature insists on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

from sm70_moe.admission.checks.layer import Layer, equal, look_at
from sm70_moe.decision import Finding, Plain, Reason, Status
from sm70_moe.facts import Alike, LayerFacts
from sm70_moe.grouping import CHECK as SHARD
from sm70_moe.machine.devices import Device
from sm70_moe.policy import Check, Contract

_FACTS: Mapping[Check, tuple[Reason, Callable[[Contract], Plain], Callable[[LayerFacts], Plain]]] = {
    Check.FORMAT: (Reason.FORMAT, lambda c: c.weights.format, lambda f: f.format),
    Check.BITS: (Reason.BITS, lambda c: c.weights.bits, lambda f: f.bits),
    Check.ZERO_POINT: (Reason.ZERO_POINT, lambda c: c.weights.zero_point, lambda f: f.zero_point),
    Check.EXPERTS: (Reason.EXPERTS, lambda c: c.experts, lambda f: f.experts),
    Check.TOP_K: (Reason.TOP_K, lambda c: c.top_k, lambda f: f.top_k),
    Check.HIDDEN: (Reason.HIDDEN, lambda c: c.hidden, lambda f: f.hidden),
    Check.INTERMEDIATE: (Reason.INTERMEDIATE, lambda c: c.intermediate, lambda f: f.intermediate_per_rank),
    Check.TENSOR_PARALLEL: (Reason.TENSOR_PARALLEL, lambda c: c.tensor_parallel, lambda f: f.tensor_parallel),
    Check.EXPERT_PARALLEL: (Reason.EXPERT_PARALLEL, lambda c: c.expert_parallel, lambda f: f.expert_parallel),
    Check.CHECKPOINT_GROUP: (Reason.GROUP_SIZE, lambda c: c.weights.checkpoint_group, lambda f: f.checkpoint_group),
    Check.ACTIVATION: (Reason.ACTIVATION, lambda c: c.activation, lambda f: f.activation),
    Check.ACTIVATIONS: (Reason.ACTIVATION_DTYPE, lambda c: c.activations, lambda f: f.activations),
}
"""Check -> reason, what the contract says, what the layer is. Group and architecture checks need more: below."""

NAMES = {check: check.value.replace("_", " ") for check in Check} | {
    Check.TOP_K: "top-k",
    Check.ACTIVATIONS: "activation dtype",
    Check.CHECKPOINT_GROUP: "checkpoint group",
}
_QUANTISED = {Check.BITS, Check.ZERO_POINT, Check.CHECKPOINT_GROUP}


def contract_findings(contract: Contract, layer: Layer, device: Device | None) -> Mapping[Check, Finding]:
    """A finding for each check that the contract has a value for; None in a contract means any.

    What the base findings of the layer have settled already is not looked at again.
    """
    return found_of(contract, layer.alike, device)


@lru_cache(maxsize=256)  # the layers of a model are alike
def found_of(contract: Contract, alike: Alike, device: Device | None) -> Mapping[Check, Finding]:
    """See `contract_findings`."""
    layer = look_at(LayerFacts.of(alike))
    settled = {f.check for f in layer.base if f.status is not Status.PASS}
    found = {check: contract_finding(contract, check, layer, device) for check in Check if NAMES[check] not in settled}
    return MappingProxyType({check: finding for check, finding in found.items() if finding is not None})


def contract_finding(contract: Contract, check: Check, layer: Layer, device: Device | None) -> Finding | None:
    if check is Check.PREPARED_GROUP:
        return prepared_group(contract.weights.prepared_group, layer)
    if check is Check.ARCHITECTURE:
        return architecture(contract.architectures, device)
    reason, accepted, actual = _FACTS[check]
    expected, name = accepted(contract), NAMES[check]
    if expected is None:
        return None
    if check in _QUANTISED and not layer.readable:
        return Finding.skipped(name, "format")
    if check is Check.INTERMEDIATE and layer.uneven:
        return Finding.skipped(name, SHARD)
    return equal(name, reason, expected, actual(layer.facts))


def prepared_group(expected: int | None, layer: Layer) -> Finding | None:
    """Can the rank's banks have the contract's group size, re-grouped or not?"""
    if expected is None:
        return None
    name = NAMES[Check.PREPARED_GROUP]
    if layer.grouping is None:
        return Finding.skipped(name, SHARD)
    if layer.grouping.widest % expected:
        return Finding.failed(name, Reason.PREPARED_GROUP, expected, layer.grouping.widest)
    return Finding.passed(name, expected)


def architecture(accepted: tuple[str, ...] | None, device: Device | None) -> Finding | None:
    """Is there evidence for this architecture?"""
    if accepted is None:
        return None
    name = NAMES[Check.ARCHITECTURE]
    if device is None:
        return Finding.skipped(name, "device")
    if device.architecture not in accepted:
        return Finding.failed(name, Reason.ARCHITECTURE, list(accepted), device.architecture)
    return Finding.passed(name, device.architecture)
