"""Every public model that can be run at all has a native route from one token, without a policy of its own."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.facts import CallFacts, LayerFacts
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import choose_policy, shipped_policies
from sm70_moe.testing import fake_build, fake_machine, settings

MODELS = list(csv.DictReader((Path(__file__).parents[1] / "data" / "models.csv").read_text().splitlines()))
POLICIES = shipped_policies()


def facts(row: dict[str, str], **changes: object) -> LayerFacts:
    """A layer of this row, as an engine would describe its first rank."""
    given = {
        "layer": "model.layers.0.mlp.experts",
        "index": 0,
        "hidden": int(row["H"]),
        "intermediate": int(row["I"]),
        "experts": int(row["E"]),
        "top_k": int(row["k"]),
        "format": "awq",
        "packing": "gemm",
        "bits": 4,
        "zero_point": True,
        "checkpoint_group": int(row["g"]),
        "activation": "silu",
        "gated": True,
        "bias": False,
        "router_weight_on_input": False,
        "activations": "float16",
        "tensor_parallel": int(row["tp"]),
        "tensor_rank": 0,
        "expert_parallel": 1,
        "expert_rank": 0,
        "device": "cuda:0",
        **changes,
    }
    return LayerFacts(**given)  # type: ignore[arg-type]  # each of its own type


def plan(row: dict[str, str], capability: tuple[int, int], **changes: object) -> Plan:
    layer = facts(row, **changes)
    machine = fake_machine(capability, fake_build(images={"sm_70", "sm_90"}))
    return Plan(admit(choose_policy(POLICIES, layer), settings(), layer, machine))


def native(found: Plan, tokens: int) -> bool:
    admission = found.admission
    call = CallFacts.usual(tokens, admission.facts.hidden or 0, admission.facts.top_k or 0)
    route = found.route(call)
    return route is not None and admission.machine.backends[route.backend].native  # type: ignore[union-attr]  # loaded


@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
def test_every_model_that_can_run_is_native_from_one_token(capability: tuple[int, int]) -> None:
    """214 of the 240 rows: the others cannot be cut for so many ranks at all."""
    plans = [plan(row, capability) for row in MODELS]
    able = [found for found in plans if found.supported]
    assert (len(MODELS), len(able)) == (240, 214)
    slow = [(found.admission.facts, tokens) for found in able for tokens in range(1, 9) if not native(found, tokens)]
    assert slow == []


@pytest.mark.parametrize(
    ("format", "packing"), [("compressed-tensors", "pack-quantized"), ("gptq", "gptq"), ("gptq", "gptq_v2")]
)
def test_every_readable_format_is(format: str, packing: str) -> None:
    """What a file was packed as does not matter to the banks."""
    plans = [plan(row, (7, 0), format=format, packing=packing) for row in MODELS]
    assert sum(native(found, 1) for found in plans if found.supported) == 214
