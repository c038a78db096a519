"""Layers of public models on a GPU, in FP16 and BF16: right first, then timed beside rooflines of the same run.

    python bench/models.py OUT.json [proof] [host] [right] [time] [NAME ...]

Kernels for the sizes come from `SM70_MOE_KERNEL_CACHE` or the compiler, as an engine would have them.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sm70_moe.benchmark.arms import arms
from sm70_moe.benchmark.routing import Routing
from sm70_moe.benchmark.setup import Setup
from sm70_moe.benchmark.stand import Stand
from sm70_moe.benchmark.timing import CudaStopwatch, Layer, all_layers, sample
from sm70_moe.benchmark.weights import random_banks, reference_of
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs, Trial
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.bound import current_stream
from sm70_moe.kernels.native.launch import Launcher
from sm70_moe.layout import BankShape
from sm70_moe.numbers.codes import ExpertCodes
from sm70_moe.plan.memory import backend
from sm70_moe.plan.plan import Plan
from sm70_moe.reading.loading import prepare
from sm70_moe.reading.source import TensorSource
from sm70_moe.runtime.arena import Arena
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.proof import Prover
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.settings.settings import Settings

DEVICE, LAYERS, BANKS = "cuda:0", 48, 8
GEOMETRIES = {
    "first": (2560, 160, 512, 10, 32),
    "qwen30": (2048, 192, 128, 8, 32),
    "q2": (2048, 384, 128, 8, 128),
    "q1": (2048, 768, 128, 8, 128),
    "glm": (4096, 352, 128, 8, 32),
    "qnext": (2048, 512, 512, 10, 128),
    "mix": (4096, 3584, 8, 2, 128),
    "lite": (2048, 704, 64, 6, 64),
    "mini": (3072, 192, 256, 8, 64),
}
"""H, I of a rank, experts, top-k, group."""

WATCH = CudaStopwatch()


def facts(name: str, dtype: str, experts: int | None = None) -> LayerFacts:
    hidden, inner, every, top_k, group = GEOMETRIES[name]
    return LayerFacts(
        layer=f"{name}.{dtype}.{experts}", index=1, hidden=hidden, intermediate=inner, experts=experts or every,
        top_k=top_k, format="gptq", packing="gptq", bits=4, zero_point=True, checkpoint_group=group,
        activation="silu", gated=True, bias=False, router_weight_on_input=False,
        activations=dtype, tensor_parallel=1, tensor_rank=0,
        expert_parallel=1, expert_rank=0, device=DEVICE,
    )  # fmt: skip


def planned(service: AdmissionService, name: str, dtype: str, experts: int | None = None) -> Plan:
    return service.admit(facts(name, dtype, experts))


def shape_of(name: str, experts: int | None = None) -> BankShape:
    hidden, inner, every, _, _ = GEOMETRIES[name]
    return BankShape(experts or every, hidden, inner)


def native_of(plan: Plan) -> NativeBackend:
    found = backend(plan.admission, "decode")
    assert isinstance(found, NativeBackend)
    assert "decode" in {route.backend for route in plan.routes}, [str(route) for route in plan.routes]
    return found


def right(service: AdmissionService, name: str) -> dict[str, Any]:
    """Bound fractions, and a token's bits alone against those of its row, for both dtypes."""
    top_k, found = GEOMETRIES[name][3], {}
    for dtype in ("float16", "bfloat16"):
        plan = planned(service, name, dtype, max(12, top_k) if name != "mix" else 8)
        assert plan.layout is not None
        runs, banks = (
            native_of(plan),
            random_banks(plan.layout, shape_of(name, plan.admission.facts.experts), DEVICE, 5),
        )
        reference, rows = reference_of(banks), []
        for tokens in (1, 2, 3, 4, 5, 8):
            call = Inputs.random(
                tokens, top_k, hidden=banks.shape.hidden, experts=banks.shape.experts, seed=tokens, device=DEVICE
            )
            call = Inputs(call.x.to(getattr(torch, dtype)), call.ids, call.weights)
            alone = alike(runs, banks, call)
            if tokens not in (1, 8):
                rows.append((tokens, alone))
                continue
            trial = Trial(
                "native", runs.name, lambda c, r=runs, b=banks: r.run(b, c), reference, banks.shape.intermediate, 2.0,
                1 if name == "mix" or tokens == 1 else 2,
            )  # fmt: skip
            r = trial.judge(call)
            rows.append((tokens, alone, round(r.w13, 3), round(r.w2, 3), round(r.out, 3), r.out_exact, r.ok))
        found[dtype] = {"route": str(plan.routes[0]), "rows": rows}
    return found


def alike(runs: NativeBackend, banks: Any, call: Inputs) -> bool:
    """Each row alone has the bits of the whole call."""
    whole = torch.empty_like(call.x)
    runs.run(banks, Call(call.x, call.ids, call.weights, whole))
    good = True
    for row in range(call.tokens):
        part = slice(row, row + 1)
        out = torch.empty_like(call.x[part])
        runs.run(banks, Call(call.x[part].clone(), call.ids[part].clone(), call.weights[part].clone(), out))
        good = good and torch.equal(out.view(torch.int16), whole[part].view(torch.int16))
    return good


def took(layer: Layer, samples: int, captures: int = 1) -> float:
    """Median microseconds of a layer, over a few graphs."""
    all_layers(layer, LAYERS)()
    found = []
    for _ in range(captures):
        again = WATCH.capture(all_layers(layer, LAYERS))
        again()
        found += [sample(WATCH, again, LAYERS, 5) for _ in range(samples)]
    return sorted(found)[len(found) // 2]


def roofline(stand: Stand) -> tuple[float, str]:
    """The fastest plain shape: each once, the best three again."""
    every = [a for a in arms(stand, []) if (a.name, a.launch, a.part) == ("roofline", "plain", "both")]
    layers = {arm.shape or "": arm.ready(stand).layer for arm in every}
    first = sorted((took(layer, 2), shape) for shape, layer in layers.items())
    return min((took(layers[shape], 7), shape) for _, shape in first[:3])


def ours(stand: Stand, runs: NativeBackend) -> Layer:
    separate, setup = stand.separate(), stand.setup
    for banks in setup.banks:
        runs.ready(banks, setup.top_k)

    def layer(n: int) -> None:
        separate(n)
        runs.run(setup.bank(n), Call(stand.x, stand.ids, stand.weights, stand.out), setup.space)

    return layer


def timed(service: AdmissionService, name: str) -> dict[str, Any]:
    plans = {dtype: planned(service, name, dtype) for dtype in ("float16", "bfloat16")}
    plan, shape, found = plans["float16"], shape_of(name), {}
    assert plan.layout is not None
    launcher = Launcher.open(DEVICE, service.settings.kernels)
    stream = current_stream(torch.device(DEVICE))
    setup = Setup.make(plan, plan.layout, shape, DEVICE, BANKS, 1, launcher, stream)
    runs, folder = native_of(plan), service.settings.kernels
    any_sizes = replace(NativeBackend("decode").configured(folder, True), specialiser=None)
    for tokens in (1, 2, 4, 8):
        routing = Routing.make("uniform", LAYERS, BANKS, tokens, setup.top_k, shape.experts)
        stand = Stand(setup, routing)
        roof, label = roofline(stand)
        row: dict[str, Any] = {"D": round(routing.mean_distinct(), 1), "roofline": roof, "shape": label}
        row["dependent"] = took(ours(stand, runs.configured(folder, True)), 7, 3)
        row["plain"] = took(ours(stand, runs.configured(folder, False)), 7, 3)
        row["any sizes"] = took(ours(stand, any_sizes), 7)
        whole = stand.x, stand.inner, stand.out
        stand.x, stand.inner, stand.out = (tensor.to(torch.bfloat16) for tensor in whole)
        row["bfloat16"] = took(ours(stand, native_of(plans["bfloat16"]).configured(folder, True)), 7, 3)
        row["finite"] = bool(stand.out.isfinite().all())
        found[str(tokens)] = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()} | {
            "ratio": {k: round(row[k] / roof, 2) for k in ("dependent", "plain", "any sizes", "bfloat16")},
            "bfloat16 / float16": round(row["bfloat16"] / row["dependent"], 3),
            "any / own": round(row["any sizes"] / row["dependent"], 2),
        }
    return found


def proven(service: AdmissionService, name: str) -> dict[str, Any]:
    """Milliseconds a layer of the proof over 48: an engine's tensors on the GPU, and codes on the host."""
    hidden, inner, _, _, group = GEOMETRIES[name]
    layer, found = SyntheticLayer(16, hidden, inner, group, seed=7), {}
    kept = {expert: layer.read(expert, group) for expert in range(16)}
    words = [layer.words(expert) for expert in range(16)]
    tensors = {}
    for kind in ("qweight", "qzeros", "scales"):
        both = [np.concatenate((getattr(w.gate, kind), getattr(w.up, kind)), 1) for w in words]
        tensors[f"w13_{kind}"] = torch.from_numpy(np.stack(both)).to(DEVICE)
        tensors[f"w2_{kind}"] = torch.from_numpy(np.stack([getattr(w.down, kind) for w in words])).to(DEVICE)
    for dtype in ("float16", "bfloat16"):
        plan = planned(service, name, dtype, 16)
        assert plan.layout is not None
        backends = {route.backend: backend(plan.admission, route.backend) for route in plan.routes}
        space = Arena(torch.device(DEVICE))
        space.reserve(1 << 22)
        engine = TensorSource(**tensors, group=group)
        banks = prepare(engine, plan.layout, shape_of(name, 16), DEVICE)
        plans = [Plan(replace(plan.admission, facts=replace(plan.admission.facts, index=index))) for index in range(48)]
        for label, source in (("engine", engine), ("host", Kept(kept))):
            prover = Prover()
            proofs = [prover.prove(one, banks, source, backends, space) for one in plans]
            prover.seconds = 0.0
            for one in plans:
                prover.prove(one, banks, source, backends, space)
            found[f"{dtype} {label}"] = {
                "milliseconds": round(prover.seconds / 48 * 1e3, 3),
                "ok": all(proof.ok for every in proofs for proof in every),
                "calls": [proof.tokens for proof in proofs[0]],
                "worst": [max(p.w13 for e in proofs for p in e), max(p.out for e in proofs for p in e)],
            }
    return found


@dataclass(frozen=True)
class Kept:
    """Codes that were made before."""

    codes: dict[int, ExpertCodes]
    experts: int = 16

    def read(self, expert: int, group: int) -> ExpertCodes:
        return self.codes[expert]


def host(service: AdmissionService, name: str) -> dict[str, float]:
    """Microseconds of host time of an eager layer call, the best of a few rounds."""
    plan, top_k = planned(service, name, "float16", 16), GEOMETRIES[name][3]
    assert plan.layout is not None
    banks, space = random_banks(plan.layout, shape_of(name, 16), DEVICE, 5), Arena(torch.device(DEVICE))
    space.reserve(1 << 22)
    backends = {route.backend: backend(plan.admission, route.backend) for route in plan.routes}
    layer, found = MoELayer(plan, banks, backends, None, space), {}
    for tokens in (1, 4, 8):
        call = Inputs.random(tokens, top_k, hidden=banks.shape.hidden, experts=16, seed=1, device=DEVICE)
        out, best = torch.empty_like(call.x), float("inf")
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                layer(call.x, call.ids, call.weights, out)
            best = min(best, (time.perf_counter() - start) / 200)
        found[str(tokens)] = round(best * 1e6, 2)
    return found


def guarded(report: dict[str, Any], out: Path, key: str, work: Callable[[], Any]) -> None:
    start = time.monotonic()
    try:
        found = work()
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"[:400]
    report[key] = found
    out.write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")
    print(f"{key} {time.monotonic() - start:.1f} s", json.dumps(found, default=str)[:1500], flush=True)
    torch.cuda.empty_cache()


def main(out: Path, *words: str) -> None:
    report: dict[str, Any] = {}
    service = AdmissionService(Settings.from_env())
    names = [word for word in words if word in GEOMETRIES] or list(GEOMETRIES)
    for word, work in (("proof", proven), ("host", host), ("right", right), ("time", timed)):
        for name in (names if word in ("right", "time") else names[:1]) if word in words else ():
            guarded(report, out, f"{word} {name}", lambda w=work, n=name: w(service, n))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
