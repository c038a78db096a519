"""One rank of four, started by torchrun: agrees on a plan as the scenario says, writes down what came out.

Scenarios: same, flag (rank 2 has another flag), require (rank 1 requires what rank 3 has not),
build (rank 3 has no native build), strict (the policy raises), dies (rank 1 leaves), late (rank 1
sleeps).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from sm70_moe.admission.admit import admit
from sm70_moe.errors import RankDisagreement
from sm70_moe.plan.agreement import agree
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings


def main(scenario: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    dist.barrier()  # every rank is connected before one leaves
    policy = load_policy("qwen3.8-flash-next-awq-tp4")
    if scenario == "strict":
        policy = policy.model_copy(update={"on": policy.on.model_copy(update={"disagreement": "raise"})})
    flags = {"qpn_m1": "0"} if scenario in ("flag", "strict") and rank == 2 else {}
    flags |= {"qpn_m1": "1"} if scenario == "require" and rank == 1 else {}
    missing = scenario in ("build", "require") and rank == 3
    machine = fake_machine(build="missing" if missing else "fake")
    plan = Plan(admit(policy, settings(flags), contract_facts(policy, tensor_rank=rank), machine))
    if rank == 1 and scenario == "dies":
        os._exit(0)
    if rank == 1 and scenario == "late":
        time.sleep(20)
    start = time.monotonic()
    try:
        # ranks that all answer may be slow on a busy machine
        (agreed,) = agree([plan], seconds=5 if scenario in ("dies", "late") else 60)
        came_out = ",".join(route.name for route in agreed.routes)
    except RankDisagreement as error:
        came_out = f"RankDisagreement: {error}"
    Path(folder, f"{rank}.txt").write_text(f"{time.monotonic() - start:.0f} {came_out}", encoding="utf-8")
    os._exit(0)  # a group with a dead member cannot be shut down in order


main(*sys.argv[1:])
