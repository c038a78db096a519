"""Acceptance of the product on a GPU: admitted routes against FP64, graphs, compilation, host time.

    python bench/accept.py OUT.json [POLICY]

Everything goes through `AdmissionService` and `MoELayer`, as an engine would; weights are synthetic.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sm70_moe as sm
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs, Trial, same_bits
from sm70_moe.plan.memory import backend
from sm70_moe.runtime.operator import register

DEVICE = "cuda:0"
TOKENS = (1, 2, 3, 4, 5, 8, 9, 64, 128)


def inputs(layer: sm.MoELayer, tokens: int, seed: int) -> Inputs:
    shape, facts = layer.banks.shape, layer.plan.admission.facts
    return Inputs.random(tokens, facts.top_k or 1, hidden=shape.hidden, experts=shape.experts, seed=seed, device=DEVICE)


def judge(layer: sm.MoELayer, source: SyntheticLayer) -> list[dict[str, Any]]:
    """Every route that a call may take, on fresh inputs, against the FP64 reference."""
    rows = []
    for tokens in TOKENS:
        for route in layer.plan.reachable(tokens):
            run = partial(backend(layer.plan.admission, route.backend).run, layer.banks)
            trial = Trial(route.name, route.backend, run, source.reference, layer.banks.shape.intermediate, factor=2.0)
            rows.append(dict(trial.judge(inputs(layer, tokens, 100 + tokens)).record()))
            print(rows[-1], flush=True)
    return rows


def neighbours(layer: sm.MoELayer) -> bool:
    """A token's row has the same bits alone and in every batch up to 8."""
    call = inputs(layer, 8, 7)
    alone = [layer(call.x[i : i + 1], call.ids[i : i + 1], call.weights[i : i + 1]) for i in range(8)]
    return all(same_bits(layer(call.x[:m], call.ids[:m], call.weights[:m]), torch.cat(alone[:m])) for m in range(2, 9))


def graphs(layer: sm.MoELayer) -> dict[int, bool]:
    """Replays with changed inputs and routing have the bits of eager calls."""
    found = {}
    for tokens in TOKENS:
        held = inputs(layer, tokens, 1)
        out = torch.full_like(held.x, torch.nan)
        layer(held.x, held.ids, held.weights, out)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(held.x, held.ids, held.weights, out)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(held.x, held.ids, held.weights, out)
        same = True
        for seed in (2, 3, 4):
            fresh = inputs(layer, tokens, seed)
            for mine, theirs in ((held.x, fresh.x), (held.ids, fresh.ids), (held.weights, fresh.weights)):
                mine.copy_(theirs)
            out.fill_(torch.nan)
            graph.replay()
            same &= same_bits(out, layer(fresh.x, fresh.ids, fresh.weights))
        found[tokens] = same
    return found


def compiled(layer: sm.MoELayer, way: str) -> dict[int, bool]:
    """The operator in a compiled function has the bits of the layer."""
    handle, digest = register(layer), layer.plan.digest

    def block(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.ops.sm70_moe.experts(x, ids, weights, digest, handle)

    made = torch.compile(block, fullgraph=True, dynamic=True, backend=way)
    found = {}
    for tokens in (1, 2, 8, 9, 128):
        call = inputs(layer, tokens, 11)
        found[tokens] = same_bits(made(call.x, call.ids, call.weights), layer(call.x, call.ids, call.weights))
    return found


def host_time(layer: sm.MoELayer, tokens: int, calls: int = 3000) -> float:
    """Microseconds of Python and driver for one eager call, into a given output; the least of five batches."""
    call = inputs(layer, tokens, 5)
    out = torch.empty_like(call.x)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            layer(call.x, call.ids, call.weights, out)
        best = min(best, (time.perf_counter() - start) / (calls // 5))
        torch.cuda.synchronize()
    return best * 1e6


def main(out: str, name: str = "qwen3.8-flash-next-awq-tp4") -> None:
    policy = sm.load_policy(name)
    facts = contract_facts(policy, device=DEVICE)
    service = sm.AdmissionService(policy=policy)
    plan = service.admit(facts)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "policy": name,
        "build": service.machine.build.id if service.machine.build else None,
        "decisions": {
            d.feature: [d.outcome.value, [f"{f.check}: {f.observed}" for f in d.obstacles]] for d in plan.decisions
        },
    }
    print(json.dumps(report, indent=1), flush=True)
    ranks, rank = facts.tensor_parallel or 1, facts.tensor_rank or 0
    source = SyntheticLayer(
        facts.experts or 1, facts.hidden or 1, facts.intermediate or 1, facts.checkpoint_group or 32, ranks, rank
    )
    start = time.perf_counter()
    layer = service.layer(facts, source)
    report["seconds_to_prepare"] = time.perf_counter() - start
    report["host_us"] = {m: host_time(layer, m) for m in (1, 8)}
    report["results"] = judge(layer, source)
    report["neighbours"] = neighbours(layer)
    report["graphs"] = graphs(layer)
    for way in ("aot_eager", "inductor"):
        try:
            report[f"compiled_{way}"] = compiled(layer, way)
        except Exception as error:  # reported, and the rest is still worth having
            report[f"compiled_{way}"] = f"{type(error).__name__}: {error}"[:500]
    Path(out).write_text(json.dumps(report, indent=1))
    print({k: v for k, v in report.items() if k not in ("results", "decisions")})
    print("all ok", all(row["ok"] for row in report["results"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
