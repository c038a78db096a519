"""Every public model that can be run at all has a native route from one token, without a policy of its own."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.decision import Reason
from sm70_moe.facts import CallFacts, LayerFacts
from sm70_moe.kernels.build.images import SPECIALISED
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.machine.machine import Machine
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


def with_compiler(found: Machine, missing: str = "") -> Machine:
    """The same machine with kernels for any sizes, and a compiler for the others unless `missing` says why not."""
    assert found.build is not None
    made = Specialiser(None, compiler=lambda jobs, _: {job.key: b"cubin" for job in jobs}, missing=lambda: missing)
    there = dict.fromkeys(STEPS, found.build.images)
    return replace(found, build=replace(found.build, backends=there, sizes=dict.fromkeys(STEPS, ()), specialiser=made))


def in_bfloat16(row: dict[str, str], capability: tuple[int, int], missing: str | None = "") -> Plan:
    layer = facts(row, activations="bfloat16")
    machine = fake_machine(capability, fake_build(images={"sm_70", "sm_80", "sm_90"}))
    machine = machine if missing is None else with_compiler(machine, missing)
    return Plan(admit(choose_policy(POLICIES, layer), settings(), layer, machine))


def bfloat16_calls(found: Plan) -> set[str]:
    """Routes of calls of 1 to 8 tokens in BF16, and of one in FP16 behind a colon."""
    sizes = found.admission.facts.hidden or 0, found.admission.facts.top_k or 0
    names = {
        (found.route(CallFacts.usual(tokens, *sizes, dtype="bfloat16")) or found.routes[-1]).name
        for tokens in range(1, 9)
    }
    return names | {":" + (found.route(CallFacts.usual(1, *sizes)) or found.routes[-1]).name}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_every_model_is_native_in_bfloat16_too(capability: tuple[int, int]) -> None:
    """From sm_80 on, where kernels can be compiled: all rows whose policy knows their dtype; FP16 calls of such a
    layer go to the portable route, since kernels are made for one dtype."""
    for row in MODELS[::7]:
        plan = in_bfloat16(row, capability)
        if plan.supported:
            assert bfloat16_calls(plan) <= {"native_decode", ":legacy", ":legacy_single_token"}, row
            assert plan.routes[0].choice.version == SPECIALISED


def test_bfloat16_on_volta_has_a_reason() -> None:
    """sm_70 has no tensor cores for it: the layer runs, on the portable route."""
    plan = in_bfloat16(MODELS[0], (7, 0))
    assert plan.admission.decision("native_decode").reasons == (Reason.ACTIVATION_DTYPE,)
    assert all(route.backend == "legacy" for route in plan.routes)


@pytest.mark.parametrize("missing", [None, "nvrtc: found none: pip install nvrtc"])
def test_bfloat16_without_a_compiler_has_a_reason(missing: str | None) -> None:
    """No build holds such kernels."""
    plan = in_bfloat16(MODELS[0], (9, 0), missing)
    (finding,) = plan.admission.decision("native_decode").obstacles
    assert (finding.reason, finding.hint) == (Reason.KERNEL_SIZES, missing or "SM70_MOE_KERNEL_CACHE=0")


def test_bfloat16_changes_the_plan() -> None:
    """Ranks that disagree on the dtype disagree on the plan, and launch other kernels."""
    plans = [in_bfloat16(MODELS[0], (9, 0)), plan(MODELS[0], (9, 0))]
    assert plans[0].routes[0].choice != plans[1].routes[0].choice
