"""The portable route on a GPU: bounds, bits, graphs, memory, then times beside torch's dense product.

    python bench/legacy.py OUT.json [seconds]

First contract (E 512, k 10, H 2560, I 160, group 32), banks made on the device. The dense product is BF16
weights of all experts and torch's grouped product over sorted rows, W13 and W2, without what stands between them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sm70_moe.benchmark.weights import random_banks, reference_of
from sm70_moe.evidence.trial import Inputs, Trial
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.portable.fma import fma32
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata

SHAPE, TOP_K = BankShape(512, 2560, 160), 10
DEVICE = "cuda:0"
LEGACY = LegacyBackend()
Report = dict[str, Any]


def routed(given: Inputs, kind: str) -> Inputs:
    """Routing as it was drawn, every slot on one expert, or most ids invalid."""
    ids = given.ids.clone()
    if kind == "one expert":
        ids[:] = 7
    if kind == "mostly invalid":
        ids[torch.rand(ids.shape, device=ids.device) < 0.9] = -1
    return replace(given, ids=ids)


def judged(banks: Any, tokens: int, kind: str, dtype: str) -> Report:
    given = routed(inputs(tokens, dtype), kind)
    trial = Trial("legacy", "legacy", lambda c: LEGACY.run(banks, c), reference_of(banks), SHAPE.intermediate, 2.0, 3)
    return {"tokens": tokens, "routing": kind, "dtype": dtype, **trial.judge(given).record()}


def inputs(tokens: int, dtype: str = "float16", seed: int = 0) -> Inputs:
    sizes = {"hidden": SHAPE.hidden, "experts": SHAPE.experts}
    return Inputs.random(tokens, TOP_K, dtype=dtype, seed=seed or tokens, device=DEVICE, **sizes)  # type: ignore[arg-type]


def fused() -> bool:
    """Has torch's addcmul of FP32 the bits of a fused multiply-add?"""
    a, b, c = (torch.randn(1 << 20, device=DEVICE) for _ in range(3))
    b = b.half().float()
    c = torch.where(torch.rand_like(c) < 0.5, -(a * b), c)  # cancels: only a fused one keeps the product's end
    return bool(torch.equal(torch.addcmul(c, b.half(), a), fma32(a, b, c)))


def graph(banks: Any, tokens: int) -> Report:
    """A captured call, replayed with other routings, against the eager one."""
    one, out = inputs(tokens), torch.empty(tokens, SHAPE.hidden, dtype=torch.float16, device=DEVICE)
    call = Call(one.x, one.ids, one.weights, out)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        LEGACY.run(banks, call)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        LEGACY.run(banks, call)
    equal = True
    for seed in (11, 12):
        other = inputs(tokens, seed=seed)
        for mine, theirs in ((one.x, other.x), (one.ids, other.ids), (one.weights, other.weights)):
            mine.copy_(theirs)
        made.replay()
        wanted = torch.empty_like(out)
        LEGACY.run(banks, Call(other.x, other.ids, other.weights, wanted))
        equal &= torch.equal(out, wanted)
    return {"tokens": tokens, "equal": equal, "replay_us": timed(made.replay)}


def memory(banks: Any, tokens: int, dtype: str = "float16") -> Report:
    given = inputs(tokens, dtype)
    out = torch.empty_like(given.x)
    call = Call(given.x, given.ids, given.weights, out)
    LEGACY.run(banks, call)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    LEGACY.run(banks, call)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    stated = LEGACY.workspace(SHAPE, TOP_K, tokens)
    return {"tokens": tokens, "dtype": dtype, "stated": stated, "measured": measured, "ok": measured <= stated}


def timed(run: Callable[[], Any], rounds: int = 5) -> float:
    """Microseconds: the median of a few calls, each between two events."""
    run()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return sorted(found)[len(found) // 2]


def dense(tokens: int, ids: torch.Tensor, x: torch.Tensor) -> Callable[[], Any]:
    """BF16 grouped products of the same sizes, rows sorted beforehand."""
    w13 = torch.randn(SHAPE.experts, SHAPE.hidden, 2 * SHAPE.intermediate, device=DEVICE, dtype=torch.bfloat16)
    w2 = torch.randn(SHAPE.experts, SHAPE.intermediate, SHAPE.hidden, device=DEVICE, dtype=torch.bfloat16)
    order = ids.flatten().long().sort()
    rows = x.bfloat16()[order.indices // TOP_K].contiguous()
    ends = torch.bincount(order.values, minlength=SHAPE.experts).cumsum(0).int()
    inner = torch.randn(len(rows), SHAPE.intermediate, device=DEVICE, dtype=torch.bfloat16)
    grouped = torch._grouped_mm

    def run() -> None:
        grouped(rows, w13, offs=ends)
        grouped(inner, w2, offs=ends)

    return run


def main(out: Path, seconds: float) -> None:
    start = time.monotonic()
    report: Report = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "fused": fused()}
    print("fused", report["fused"], flush=True)
    banks = random_banks(BankLayout("octet32", Metadata.FOUR_BYTE, 32, True, True), SHAPE, DEVICE, 3)
    tiles = random_banks(BankLayout("tile32x8", Metadata.THREE_BYTE, 32, True, True), SHAPE, DEVICE, 3)
    work: list[tuple[str, Callable[[], Report]]] = []
    work += [("checks", lambda t=t: judged(banks, t, "drawn", "float16")) for t in (1, 9, 64, 128, 1024, 8192)]
    for kind in ("one expert", "mostly invalid"):
        work += [("checks", lambda t=t, k=kind: judged(tiles, t, k, "float16")) for t in (64, 1024)]
    work += [("checks", lambda d=d: judged(banks, 64, "drawn", d)) for d in ("bfloat16", "float32")]
    work += [("graphs", lambda t=t: graph(banks, t)) for t in (9, 128, 1024)]
    work += [("memory", lambda t=t: memory(banks, t)) for t in (1, 9, 128, 1024, 4877, 8192)]
    work += [("memory", lambda: memory(banks, 1024, "float32"))]
    for tokens in (1, 9, 16, 64, 128, 1024, 8192):

        def times(t: int = tokens) -> Report:
            given, result = inputs(t), torch.empty(t, SHAPE.hidden, dtype=torch.float16, device=DEVICE)
            call = Call(given.x, given.ids, given.weights, result)
            mine = timed(lambda: LEGACY.run(banks, call))
            try:
                other: float | str = timed(dense(t, given.ids, given.x))
            except Exception as error:  # not every torch has it
                other = f"{type(error).__name__}: {error}"[:100]
            return {"tokens": t, "us": mine, "dense_us": other}

        work.append(("times", times))
    for name, part in work:
        if time.monotonic() - start > seconds:
            print("no time left", flush=True)
            break
        try:
            found = part()
        except Exception as error:  # the other parts are worth having
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
        report.setdefault(name, []).append(found)
        print(f"{time.monotonic() - start:6.1f}", name, json.dumps(found), flush=True)
        out.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 100.0)
