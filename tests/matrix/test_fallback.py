"""The fallbacks that must hold in every cell of the matrix: flag state x native build, which is pretended here.

The settings are read from the process's real environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.decision import Outcome, Reason
from sm70_moe.errors import AdmissionRefused
from sm70_moe.evidence.oracle import reference_of
from sm70_moe.evidence.trial import Inputs, Trial
from sm70_moe.facts import CallFacts
from sm70_moe.kernels.call import Call
from sm70_moe.policy import load_policy
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import contract_facts, fake_machine

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"
NATIVE = {"qpn_m1": (1,), "grouped_decode": (2, 3, 8), "indexed_prefill": (128, 8192)}

NATIVE_ROUTES = {1: "qpn_m1", 2: "grouped_decode", 8: "grouped_decode", 9: "grouped_batch", 127: "grouped_batch"} | {
    128: "indexed_prefill"
}
OLDER_ROUTES = {1: "legacy_single_token", 2: "legacy", 8: "legacy", 9: "legacy", 127: "legacy", 128: "legacy"}


class Cell(NamedTuple):
    """What must come out of it."""

    outcome: Outcome
    reasons: tuple[Reason, ...]
    routes: dict[int, str] | None
    """The route of each token count; None: the layer is refused."""


EXPECTED = {
    ("unset", "missing"): Cell(Outcome.FELL_BACK, (Reason.BUILD_MISSING,), OLDER_ROUTES),
    ("unset", "fake"): Cell(Outcome.ADMITTED, (), NATIVE_ROUTES),
    ("unset", "stale"): Cell(Outcome.FELL_BACK, (Reason.BUILD_STALE,), OLDER_ROUTES),
    ("off", "missing"): Cell(Outcome.OFF, (Reason.FLAG_OFF,), OLDER_ROUTES),
    ("off", "fake"): Cell(Outcome.OFF, (Reason.FLAG_OFF,), OLDER_ROUTES),
    ("off", "stale"): Cell(Outcome.OFF, (Reason.FLAG_OFF,), OLDER_ROUTES),
    ("require", "missing"): Cell(Outcome.REFUSED, (Reason.BUILD_MISSING,), None),
    ("require", "fake"): Cell(Outcome.ADMITTED, (), NATIVE_ROUTES),
    ("require", "stale"): Cell(Outcome.REFUSED, (Reason.BUILD_STALE,), None),
}
"""(Flags, build) -> what comes out, the same for each native route."""


@pytest.fixture(params=["missing", "fake", "stale"])
def build(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def machine(build: str):
    return fake_machine(build=build)


@pytest.fixture
def cell(flags: str, build: str) -> Cell:
    return EXPECTED[flags, build]


@pytest.mark.parametrize("policy", ["qwen3.8-flash-next-awq-tp4", "sample-awq-tp2"])
def test_native_routes_come_out_as_the_cell_says(policy: str, cell: Cell, machine) -> None:
    """Each native route has the cell's outcome and reasons; a refusal names all three routes."""
    loaded = load_policy(policy)
    service = AdmissionService(policy=loaded, machine=machine)
    facts = contract_facts(loaded)
    if cell.routes is None:
        with pytest.raises(AdmissionRefused) as refused:
            service.admit(facts)
        decisions = {d.feature: d for d in refused.value.decisions}
        assert all(name in str(refused.value) for name in NATIVE)
    else:
        decisions = {d.feature: d for d in service.admit(facts).decisions}
    assert {name: (decisions[name].outcome, decisions[name].reasons) for name in NATIVE} == dict.fromkeys(
        NATIVE, (cell.outcome, cell.reasons)
    )
    assert decisions["legacy"].admitted


@pytest.mark.parametrize("tokens", NATIVE_ROUTES)
def test_route_of_each_token_count(tokens: int, cell: Cell, machine) -> None:
    """The plan sends each token count where the cell says."""
    policy = load_policy("qwen3.8-flash-next-awq-tp4")
    service = AdmissionService(policy=policy, machine=machine)
    if cell.routes is None:
        with pytest.raises(AdmissionRefused):
            service.admit(contract_facts(policy))
        return
    route = service.admit(contract_facts(policy)).route(CallFacts.usual(tokens, 2560, 10))
    assert route is not None
    assert route.name == cell.routes[tokens]


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 9, 128])
def test_a_real_layer_runs_by_that_route(tokens: int, cell: Cell, machine) -> None:
    """A layer of a real checkpoint runs by the cell's route, within the bound of the FP64 reference."""
    checkpoint = Checkpoint.open(CHECKPOINT)
    found = checkpoint.layers[0]
    # the layer's device is the fake GPU for admission, and the CPU for its tensors
    facts = checkpoint.facts(found, tensor_parallel=2, tensor_rank=1, device="cuda:0")
    service = AdmissionService(machine=machine)
    source = CheckpointSource(checkpoint, found, facts)
    if cell.routes is None:
        with pytest.raises(AdmissionRefused):
            service.layer(facts, source, device="cpu")
        return
    layer = service.layer(facts, source, device="cpu")
    assert layer.plan.admission.policy.name == "sample-awq-tp2"
    taken: list[str] = []
    for name, run in dict(layer.runs).items():
        layer.runs[name] = lambda *a, _name=name, _run=run: (taken.append(_name), _run(*a))[1]
    if tokens == 0:
        empty = layer(torch.empty(0, 256).half(), torch.empty(0, 4).int(), torch.empty(0, 4))
        assert empty.shape == (0, 256)
        assert taken == []
        return

    route = cell.routes[tokens]

    def call(given: Call) -> None:
        if given.intermediate is None:
            layer(given.x, given.ids, given.weights, given.out)
        else:
            layer.runs[route](layer.banks, given)

    trial = Trial(route, "matrix", call, reference_of(checkpoint, found, facts), 64)
    result = trial.judge(Inputs.random(tokens, 4, hidden=256, experts=16))
    assert result.ok, result
    assert set(taken) == {route}
