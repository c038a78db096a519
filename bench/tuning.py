"""Tuning, before and after: times of every tactic of every bucket on a GPU, and bits.

    python bench/tuning.py OUT.json [SECONDS]

For each layer: what `AdmissionService.tune` would measure (eager calls that follow each other), then rule and choice
once more in graphs of layers on banks in turn, as batches.py times them. `behind` is how much slower the rule is than
the choice: the bar is 1.10. Results are written as they come.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import structlog
import torch
from banks import DEVICE, Bank
from batches import REPORT, SHAPES, Subject, Timer, note, same
from driver import Cuda

from sm70_moe.kernels.native.tactics import BUCKETS, RULE
from sm70_moe.plan.memory import backend
from sm70_moe.runtime.arena import Arena
from sm70_moe.runtime.tuning import Stand, choose


def tuned(cuda: Cuda, name: str, space: Arena) -> dict[str, Any]:
    shape, table = SHAPES[name], {}
    count = max(2, min(8, int(1e10 // (shape.experts * 3 * shape.hidden * shape.inner))))
    subjects = [Subject.of(name, Bank(shape, n, name == "first"), space, tune_small_shapes="1") for n in range(count)]
    first = subjects[0].layer
    runs = backend(first.plan.admission, "indexed")
    for bucket in BUCKETS:
        offered = runs.tactics(first.banks, shape.top_k, bucket, "float16")
        began = time.monotonic()
        tactic, times, left_out = choose(offered, Stand.of(first, runs, bucket))
        seconds = time.monotonic() - began
        note(f"{name} {bucket} left out {left_out}", not left_out)
        timer = Timer(cuda, subjects, bucket, 24 if bucket <= 128 else 8)
        found, bits = {}, {}
        for chosen in dict.fromkeys((RULE, tactic)):
            for subject in subjects:
                runs.take(subject.layer.banks, shape.top_k, {} if chosen == RULE else {bucket: chosen})
            found[chosen] = timer.time(timer.layer)
            bits[chosen] = timer.out.clone()
        note(f"{name} {bucket} bits of {tactic}", same(bits[RULE], bits[tactic]))
        behind = found[RULE][0] / found[tactic][0]
        row = {"choice": tactic, "seconds": seconds, "times": times, "graph": found, "behind": behind}
        table[str(bucket)] = row
        print(
            f"{name:22} M<={bucket:5} {tactic:16} rule {found[RULE][0]:8.1f} chosen {found[tactic][0]:8.1f} us", end=" "
        )
        print(f"behind {behind:.3f}", {n: round(t, 1) for n, t in times.items()}, f"{seconds:.2f} s", flush=True)
    return table


def main(out: Path, limit: float) -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # a line a decision would hide the results

    def write() -> None:
        out.write_text(json.dumps(REPORT, indent=1, default=str))

    def stop() -> None:
        print("LIMIT", flush=True)
        write()
        os._exit(3)

    timer = threading.Timer(limit, stop)
    timer.daemon = True
    timer.start()
    cuda, space = Cuda(), Arena(f"{DEVICE}:0")
    for name in SHAPES:
        REPORT[f"tuned {name}"] = tuned(cuda, name, space)
        torch.cuda.empty_cache()
        write()
    worst = max(row["behind"] for n in SHAPES for row in REPORT[f"tuned {n}"].values())
    print(f"{REPORT['checks']} checks, wrong: {REPORT['wrong']}; the rule is at most {worst:.3f} times the choice")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 240.0)
