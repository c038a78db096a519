"""`sm70-moe bench --request P,T`: what a user waits for, by phase and route."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from sm70_moe.cli.counts import LARGEST_CALL
from sm70_moe.cli.output import Grid, line, status
from sm70_moe.decision import Plain
from sm70_moe.errors import SettingsError
from sm70_moe.files import write

if TYPE_CHECKING:
    from sm70_moe.benchmark.request import Part, Request
    from sm70_moe.benchmark.timing import Stopwatch
    from sm70_moe.plan.plan import Plan

CPU_BANKS = 2
"""On a CPU: its memory is the machine's."""


def read(text: str, layers: int, chunk: int) -> Request:
    """ "4096,256" as a request. Raises SettingsError for anything else."""
    from sm70_moe.benchmark.request import Request

    if not re.fullmatch("[0-9]{1,7},[0-9]{1,7}", text):
        raise SettingsError(f"--request {text!r}: expected tokens of the prompt and tokens to decode, such as 4096,256")
    if not 1 <= chunk <= LARGEST_CALL:
        raise SettingsError(f"--chunk {chunk}: expected 1 to {LARGEST_CALL}")
    prompt, decoded = map(int, text.split(","))
    return Request(prompt, decoded, layers, chunk)


def measure(plan: Plan, request: Request, device: str, banks: int | None, seed: int) -> tuple[Part, ...]:
    """Make banks of random weights, and run the request on layers as an engine has them."""
    from sm70_moe.benchmark.place import Place
    from sm70_moe.benchmark.request import HostStopwatch, run
    from sm70_moe.benchmark.session import with_kernels
    from sm70_moe.benchmark.weights import how_many, random_banks
    from sm70_moe.plan.memory import backend, bank_shape
    from sm70_moe.runtime.arena import Arena
    from sm70_moe.runtime.layer import MoELayer

    layout, shape = plan.layout, bank_shape(plan.admission)
    assert layout is not None  # the plan is supported
    assert shape is not None
    place = None if device == "cpu" else Place.cuda(device)
    with place.current() if place else nullcontext(), status("kernels") as said:
        if place is None:
            watch: Stopwatch = HostStopwatch()
            made, count = plan, banks or min(CPU_BANKS, request.layers)
        else:
            made, watch = with_kernels(plan, layout, said), place.watch
            count = min(request.layers, how_many(place.free(), layout, shape, banks))
        space = Arena(device)
        space.reserve(made.memory.resident if made.memory else 0)
        backends = {route.backend: backend(made.admission, route.backend) for route in made.routes}
        said(f"filling {count} banks")
        filled = [random_banks(layout, shape, device, seed + n) for n in range(count)]
        layers = [MoELayer(made, each, backends, None, space) for each in filled]
        return run(request, layers, watch, seed, said)


def record(plan: Plan, request: Request, parts: tuple[Part, ...], device: str) -> dict[str, Plain]:
    """Plain JSON types; microseconds."""
    total = sum(part.microseconds for part in parts)
    found: Mapping[str, Plain] = {
        "policy": plan.admission.policy.name,
        "plan": plan.digest,
        "device": device,
        "request": request.record(),
        "parts": [part.record() for part in parts],
        "phases": phases(parts),
        "microseconds": total,
    }
    return dict(found)


def phases(parts: tuple[Part, ...]) -> dict[str, Plain]:
    return {
        name: sum(p.microseconds for p in parts if p.phase == name) for name in dict.fromkeys(p.phase for p in parts)
    }


def tell(plan: Plan, request: Request, parts: tuple[Part, ...], device: str, as_json: Path | None) -> None:
    """The table, and the file if one is wanted."""
    found = record(plan, request, parts, device)
    if as_json is not None:
        write("--json", as_json, (json.dumps(found, indent=1) + "\n").encode())
    line(f"{device}   policy {found['policy']}   {request.layers} layers, experts only")
    grid = Grid("phase", "tokens a call", "route", "layer calls", "us a layer", "ms")
    for p in parts:
        each = (
            p.phase,
            str(p.tokens),
            p.route,
            str(p.steps * p.layers),
            f"{p.each:.2f}",
            f"{p.microseconds / 1e3:.2f}",
        )
        grid.add_row(*each)
    grid.show()
    for name, spent in phases(parts).items():
        line(f"{name}: {float(str(spent)) / 1e3:.2f} ms")
    line(f"request: {sum(p.microseconds for p in parts) / 1e3:.2f} ms")
