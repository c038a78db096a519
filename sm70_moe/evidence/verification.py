"""Every admitted route of a layer, on the same inputs, against the FP64 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from sm70_moe.checkpoint.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.errors import AdmissionRefused
from sm70_moe.evidence.oracle import reference_of
from sm70_moe.evidence.trial import Inputs, Result, Trial
from sm70_moe.facts import LayerFacts
from sm70_moe.plan.memory import backend, bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService


def prepare(
    service: AdmissionService, checkpoint: Checkpoint, layer: CheckpointLayer, facts: LayerFacts
) -> MoELayer | None:
    """Admit a layer and prepare its banks; None if no route can run it.

    Raises AdmissionRefused for an explicit `1` that cannot be honoured.
    """
    if not service.admit(facts).supported:
        return None
    return service.layer(facts, CheckpointSource(checkpoint, layer, facts))


def verify_layer(
    moe: MoELayer, checkpoint: Checkpoint, layer: CheckpointLayer, tokens: Sequence[int], seed: int
) -> Iterator[Result]:
    """One result per token count and route that a call of that count may take.

    The last route, `legacy`, is always among them.
    """
    plan, facts = moe.plan, moe.plan.admission.facts
    reference = reference_of(checkpoint, layer, facts)
    shape = bank_shape(plan.admission)
    if shape is None or facts.top_k is None:
        raise AdmissionRefused(facts.layer, plan.decisions, f"{facts.layer}: no route runs it")
    for count in tokens:
        call = Inputs.random(
            count,
            facts.top_k,
            hidden=shape.hidden,
            experts=shape.experts,
            dtype=facts.activations or "float16",
            seed=seed + count,
            device=facts.device or "cpu",
        )
        for route in plan.reachable(count):
            run = partial(backend(plan.admission, route.backend).run, moe.banks)
            trial = Trial(route.name, route.backend, run, reference, shape.intermediate)
            yield trial.judge(call)


def calls(plan: Plan, tokens: Sequence[int]) -> int:
    """How many results `verify_layer` will give."""
    return sum(len(plan.reachable(count)) for count in tokens)
