"""One rank of four, started by torchrun: agrees on plans as each scenario says, writes down what came out as JSON.

Scenarios, joined by commas, run one after the other in one group: same; flag (rank 2 has another
flag); build (rank 3 has no native build); require (rank 1 requires what rank 3 has not); strict (the
policy raises); wide (48 layers, a required flag on rank 2, no build on rank 3); refuses (rank 1 refuses
a layer); agrees (as refuses, but rank 1 catches that and asks to agree all the same); breaks (rank 1
fails otherwise); tunes (rank 0 chooses how batches are launched), lacks (rank 2 cannot run that), stops (rank 0
fails while it measures). By themselves: dies (rank 1 leaves, rank 3 comes last); late (rank 1 sleeps).
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from sm70_moe.errors import AdmissionRefused, Sm70MoeError
from sm70_moe.policy import load_policy
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.settings.settings import Settings
from sm70_moe.testing import contract_facts, fake_machine, settings


def patience(scenario: str) -> int:
    """Seconds that a rank waits: few where one never answers; ranks that all do may be slow on a busy machine."""
    return 5 if scenario in ("dies", "late") else 60


def main(scenarios: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for scenario in scenarios.split(","):
        dist.barrier()  # every rank is connected before one leaves
        Path(folder, f"{scenario}.{rank}.json").write_text(json.dumps(outcome(scenario, rank)), encoding="utf-8")
    os._exit(0)  # a group with a dead member cannot be shut down in order


def outcome(scenario: str, rank: int) -> dict[str, object]:
    """Routes and the findings about other ranks, or the error; and the seconds that it took."""
    start = time.monotonic()
    found: dict[str, object] = {}
    try:
        if scenario in ("tunes", "lacks", "stops"):
            return {**found, "table": tuned(scenario, rank)}
        service = admitted(scenario, rank)
        found["routes"] = [[route.name for route in plan.routes] for plan in service.plans()]
        findings = (f for plan in service.plans() for decision in plan.decisions for f in decision.findings)
        found["others"] = [finding.record() for finding in findings if finding.check == "other ranks"]
    except (Sm70MoeError, ZeroDivisionError) as error:
        found["error"], found["text"] = type(error).__name__, str(error)
    return {**found, "seconds": time.monotonic() - start}


def admitted(scenario: str, rank: int) -> AdmissionService:
    """A service whose layers are admitted and agreed on."""
    policy = load_policy("qwen3.8-flash-next-awq-tp4")
    if scenario == "strict":
        policy = policy.model_copy(update={"on": policy.on.model_copy(update={"disagreement": "raise"})})
    missing = scenario in ("build", "require", "wide") and rank == 3
    machine = fake_machine(build="missing" if missing else "fake")
    service = AdmissionService(operator(scenario, rank), policy=policy, machine=machine, rank=rank)
    if scenario == "dies" and rank == 1:
        os._exit(0)
    time.sleep({("late", 1): 20, ("dies", 3): 2}.get((scenario, rank), 0))
    with suppress(AdmissionRefused) if scenario == "agrees" else service.together(seconds=patience(scenario)):
        for index in range(48 if scenario == "wide" else 1):
            group = 128 if scenario in ("refuses", "agrees") and rank == 1 else 32
            layer = f"model.layers.{index}.mlp.experts"
            service.admit(contract_facts(policy, layer, index=index, tensor_rank=rank, checkpoint_group=group))
        if scenario == "breaks" and rank == 1:
            1 / 0  # noqa: B018 - an engine's own fault
    if scenario == "agrees":
        service.agree(seconds=patience(scenario))
    return service


def tuned(scenario: str, rank: int) -> object:
    """Rank 0's choice, on every rank."""
    import sm70_moe.runtime.tuning as tuning

    def mine() -> tuning.Table:
        assert rank == 0, "only rank 0 measures"
        if scenario == "stops":
            1 / 0  # noqa: B018 - whatever goes wrong there
        return {"layer": {"indexed": {16: "t16.2x1.4x1"}}}

    lack = "no 't16.2x1.4x1'" if (scenario, rank) == ("lacks", 2) else ""
    return tuning.together(mine, lambda table: lack, None, patience(scenario))


def operator(scenario: str, rank: int) -> Settings:
    if scenario in ("flag", "strict") and rank == 2:
        return settings({"qpn_m1": "0"})
    required = {"require": (1,), "wide": (2,), "refuses": (1,), "agrees": (1,)}
    return settings({"qpn_m1": "1"} if rank in required.get(scenario, ()) else {})


main(*sys.argv[1:])
