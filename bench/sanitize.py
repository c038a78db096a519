"""Every decode kernel once, for compute-sanitizer: both tensor-core steps, every kind of metadata, both bank orders.

    compute-sanitizer --tool memcheck  --error-exitcode 9 python bench/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python bench/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 9 python bench/sanitize.py

The installed cubins are launched through the package's own `Launcher`; torch has the memory, each tensor
an allocation of its own, so that memcheck sees a step beyond it. Volta's step is run where the build has
it (`python -m sm70_moe.kernels.build sm_90 --tests`). Exit status: 0, 1 if a result was not written or
differs between versions that must agree, 9 if the sanitizer found something.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.kernels.native.launch import Launcher, Step
from sm70_moe.kernels.native.steps import CALL, Case, bank_arguments, decode, numbers
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.reading.loading import prepare

DEVICE = "cuda:0"
TOKENS = (1, 2, 4, 8)
"""Each has another pair of kernels: w13_1 + w2_1, w13_2 + w2_1, w13_8 + w2_4, w13_8 + w2_8."""

EXPERTS = 6


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer, and the bank orders in which it is run."""

    name: str
    hidden: int
    inner: int
    top_k: int
    group: int
    orders: tuple[str, ...] = ("octet32",)
    metadata: tuple[Metadata, ...] = tuple(Metadata)


LAYERS = (
    Layer("first contract, specialised", 2560, 160, 10, 32, metadata=(Metadata.FOUR_BYTE,)),
    Layer("sample, specialised", 256, 64, 4, 32),
    Layer("runtime, group 32", 288, 96, 3, 32, ("octet32", "tile32x8")),
    Layer("runtime, group 64", 320, 128, 4, 64, ("octet32", "tile32x8"), (Metadata.THREE_BYTE,)),
    Layer("runtime, group 128", 384, 128, 5, 128, ("octet32", "tile32x8"), (Metadata.TWO_AND_HALF_BYTE,)),
)
"""The largest in one kind of metadata: under racecheck its blocks are most of the time."""


def mixed(layer: Layer, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and router weights; invalid ids, duplicates in a token and experts that tokens share."""
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layer.hidden, generator=source).half()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, layer.top_k), generator=source).int()
    weights = torch.randn(tokens, layer.top_k, generator=source)
    return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


def steps_of(launcher: Launcher) -> tuple[str, ...]:
    """Values of the axis `step` that the build has for this device."""
    there = {dict(i.version.axes).get("step") for i in launcher.images.images if i.version.source == "decode_w13"}
    test = any(i.version.test and i.version.architecture == launcher.architecture for i in launcher.images.images)
    return ("own", "volta") if test and "volta" in there else ("own",)


def programs(case: Case, step: str) -> Iterator[tuple[Step, ...]]:
    """The launches of a call; with dependent launch as well where that is the default."""
    chosen = tuple(replace(s, axes={**s.axes, "step": step}) for s in decode(case))
    yield tuple(replace(s, dependent=False) for s in chosen)
    if case.dependent and step == "own":
        yield chosen


def run(launcher: Launcher, layer: Layer, banks: Banks, tokens: int, step: str) -> list[torch.Tensor]:
    """The outputs of every way to launch one call, on poisoned buffers."""
    dependent = int(launcher.architecture.removeprefix("sm_")) >= 90
    case = Case(banks.shape, banks.layout, layer.top_k, tokens, launcher.architecture, dependent)
    planes = {
        f"{name}_{plane}": tensor.data_ptr()
        for name, bank in (("w13", banks.w13), ("w2", banks.w2))
        for plane, tensor in bank.planes.items()
        if isinstance(tensor, torch.Tensor)
    }
    sizes = {"hidden": layer.hidden, "intermediate": layer.inner, "experts": EXPERTS, "top_k": layer.top_k}
    values, outs = {**numbers(case), **bank_arguments(planes)}, []
    x, ids, weights = mixed(layer, tokens)
    for chosen in programs(case, step):
        program = launcher.program(chosen, varying=CALL, values=values, sizes={**sizes, "group": layer.group})
        out = torch.full_like(x, torch.nan)
        inner = x.new_full((tokens, layer.top_k, layer.inner), torch.nan)
        stream = torch.cuda.current_stream().cuda_stream
        program(stream, *(tensor.data_ptr() for tensor in (x, ids, weights, out, inner)))
        torch.cuda.synchronize()
        outs.append(out.cpu())
    return outs


def check(launcher: Launcher, layer: Layer, step: str) -> list[str]:
    """Run a layer in all its layouts with one step; what is wrong. All layouts hold the same weights."""
    source = SyntheticLayer(EXPERTS, layer.hidden, layer.inner, layer.group)
    shape, wrong = BankShape(EXPERTS, layer.hidden, layer.inner), []
    first: dict[int, torch.Tensor] = {}
    for order, metadata in product(layer.orders, layer.metadata):
        banks = prepare(source, BankLayout(order, metadata, layer.group, True, True), shape, DEVICE)
        for tokens in TOKENS:
            name = f"{layer.name}, {order}, {metadata}, step {step}, M = {tokens}"
            for out in run(launcher, layer, banks, tokens, step):
                if not out.isfinite().all():
                    wrong.append(f"{name}: not written, or not finite")
                elif not torch.equal(first.setdefault(tokens, out).view(torch.int16), out.view(torch.int16)):
                    wrong.append(f"{name}: other bits than the first layout or launch")
    return wrong


def main() -> int:
    # read by torch when CUDA starts, which is below
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    start = time.perf_counter()
    torch.zeros(1, device=DEVICE)
    launcher = Launcher.open(DEVICE)
    steps, wrong = steps_of(launcher), []
    print(f"{torch.cuda.get_device_name(0)}, build {launcher.images.id[:16]}, steps {', '.join(steps)}", flush=True)
    for layer, step in product(LAYERS, steps):
        wrong += check(launcher, layer, step)
        print(f"{layer.name}, step {step}: {time.perf_counter() - start:.0f} s so far", flush=True)
    if "volta" not in steps:
        print("SKIPPED step volta: this is no test build", flush=True)
    print("\n".join(wrong) or "all written, all versions agree", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
