"""One launch for one token: the bits of two launches, whatever the ids, the grid and what ran before.

A barrier that fails does not return, so calls by the thousand run in a process that can be ended.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.declared import FUSED
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.bound import Bound
from sm70_moe.kernels.native.steps import STEPS, Case, decode, fused, fused_with
from sm70_moe.plan.memory import backend

pytestmark = pytest.mark.gpu

SECONDS = 300
"""After which a stress run counts as hung; it takes a few."""


@pytest.fixture(scope="module", params=["4-byte", "3-byte"])
def both(request: pytest.FixtureRequest, layers):
    """A layer in two launches, and the same weights in one."""
    two = layers.make(metadata=request.param)
    service = layers.service(two.sizes, metadata=request.param, SM70_MOE_FUSED_DECODE="1")
    one = layers.layer(service, two.sizes)
    runs = backend(one.layer.plan.admission, "qpn")
    assert isinstance(runs, NativeBackend)
    assert runs.fused
    return two, one


def calls_of(subject) -> dict[str, Inputs]:
    """Routers' calls, and some that no router sends."""
    made = subject.call(1, seed=11)
    ids = made.ids
    kinds = {
        "different": made,
        "mixed": subject.mixed(1, seed=12),
        "mixed again": subject.mixed(1, seed=13),
        "one expert": Inputs(made.x, torch.full_like(ids, 3), made.weights),
        "first slot only": Inputs(
            made.x,
            torch.where(torch.arange(ids.shape[1], device=ids.device) == 0, ids, -1).int(),
                                made.weights),
        "last slot only": Inputs(
            made.x,
            torch.where(torch.arange(ids.shape[1], device=ids.device) == 9, ids, -1).int(),
                               made.weights),
        "none valid": Inputs(made.x, torch.full_like(ids, -1), made.weights * torch.nan),
        "far away": Inputs(made.x, torch.full_like(ids, 2**31 - 1), made.weights),
    }  # fmt: skip
    infinite = made.x.clone()
    infinite[0, 5] = torch.inf
    return kinds | {"infinity": Inputs(infinite, ids, made.weights)}


def test_it_is_one_cooperative_launch(both) -> None:
    """The record of the plan says so, and so does the step."""
    two, one = both
    assert one.layer.plan.admission.decision(FUSED).admitted
    assert not two.layer.plan.admission.decision(FUSED).admitted
    assert one.route(one.call(1).x, one.call(1).ids, one.call(1).weights, one.call(1).x.clone()) == "qpn_m1"
    assert one.layer.plan.digest != two.layer.plan.digest


def test_the_bits_of_two_launches(both) -> None:
    """And inside the bounds of the reference."""
    two, one = both
    for name, call in calls_of(two).items():
        assert same_bits(one.answer(call), two.answer(call)), name
    for call in (two.call(1, seed=21), two.mixed(1, seed=22)):
        result = one.judge(call)
        assert result.ok, result
        assert result.out_exact


def test_no_valid_id_gives_exact_zeros(both) -> None:
    """All blocks reach the barrier though no slot has work."""
    _, one = both
    for name in ("none valid", "far away"):
        assert not one.answer(calls_of(one)[name]).view(torch.int16).any()


def test_repeats_are_bitwise_equal(both) -> None:
    """A thousand calls, other ids in turn, with nothing between them."""
    two, one = both
    calls = list(calls_of(two).values())
    wanted = torch.stack([two.answer(call) for call in calls]).view(torch.int16)
    outs = torch.full((1000 // len(calls), *wanted.shape), torch.nan, dtype=torch.float16, device=one.device)
    for row in outs:
        for call, out in zip(calls, row, strict=True):
            one.layer(call.x, call.ids, call.weights, out)
    assert (outs.view(torch.int16) == wanted).all()


def test_replays_with_other_ids(both, graph_of, move) -> None:
    """Cooperative launches are captured; a hundred replays of a graph with two calls, routing changed in between."""
    two, one = both
    held = [one.call(1, seed=31), one.call(1, seed=32)]
    outs = [torch.full_like(call.x, torch.nan) for call in held]

    def work() -> None:
        for call, out in zip(held, outs, strict=True):
            one.layer(call.x, call.ids, call.weights, out)

    graph = graph_of(work)
    fresh = list(calls_of(two).values())
    for number in range(100):
        chosen = fresh[number % len(fresh)], fresh[(number * 5 + 1) % len(fresh)]
        for call, into in zip(chosen, held, strict=True):
            move(call, into)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        if number % 10 == 0:
            assert all(same_bits(out, two.answer(call)) for out, call in zip(outs, chosen, strict=True))


def programs(both, blocks: tuple[int, ...], steps=fused_with):
    """The fused kernel with grids of these sizes on one layer's scratch; the outcome of each against two launches."""
    _, one = both
    banks = one.layer.banks
    launcher = NativeBackend("qpn").launcher("cuda:0")
    shared = Bound("fused", launcher, STEPS[FUSED], banks, dependent=False)
    found = []
    for count in blocks:
        route = replace(STEPS[FUSED], steps=lambda case, count=count: steps(case, count))
        bound = Bound("fused", launcher, route, banks, dependent=False)
        bound.scratch = shared.scratch
        found.append(bound)
    return banks, found


def test_grids_of_changing_sizes_on_one_scratch(both) -> None:
    """Five hundred calls: one block, primes, more than fit, and back."""
    two, _ = both
    banks, bounds = programs(both, (1, 400, 7, 131, 10_000, 2, 400, 79))
    call = two.mixed(1, seed=41)
    wanted = two.answer(call)
    differ = torch.zeros((), dtype=torch.int64, device=two.device)
    for number in range(500):
        out = torch.full_like(call.x, torch.nan)
        bounds[number * 3 % len(bounds)](banks, Call(call.x, call.ids, call.weights, out), None)
        differ += (out.view(torch.int16) != wanted.view(torch.int16)).sum()
    assert differ.item() == 0
    arrivals = bounds[0].scratch.view(torch.int32)[0].item() & 0xFFFF
    assert arrivals == 0


def test_a_generation_that_wraps(both) -> None:
    """From the last generations of the word into the first."""
    two, _ = both
    banks, (bound, *_) = programs(both, (400,))
    bound.scratch.view(torch.int32)[0] = -(3 << 16)
    call = two.mixed(1, seed=42)
    for _ in range(6):
        out = torch.full_like(call.x, torch.nan)
        bound(banks, Call(call.x, call.ids, call.weights, out), None)
        assert same_bits(out, two.answer(call))
    assert bound.scratch.view(torch.int32)[0].item() == 3 << 16


def volta(case: Case, steps) -> tuple:
    return tuple(replace(step, axes={**step.axes, "step": "volta"}) for step in steps(case))


def test_voltas_step(both) -> None:
    """The code for a V100, but for the instruction itself: one launch has the bits of two there as well."""
    two, _ = both
    launcher = NativeBackend("qpn").launcher("cuda:0")
    there = {
        i.version.architecture
        for i in getattr(launcher.images, "installed", launcher.images).images
        if ("step", "volta") in i.version.axes
    }
    if launcher.architecture not in there:
        pytest.skip(f"the build has no version step=volta for {launcher.architecture}: it is no test build (--tests)")
    banks, (one, few) = programs(
        both, (0, 50), lambda case, count: volta(case, lambda c: fused_with(c, count) if count else fused(c))
    )
    plain = Bound("volta", launcher, replace(STEPS["qpn"], steps=lambda c: volta(c, decode)), banks, dependent=False)
    for name, call in calls_of(two).items():
        outs = [torch.full_like(call.x, torch.nan) for _ in range(3)]
        for bound, out in zip((plain, one, few), outs, strict=True):
            bound(banks, Call(call.x, call.ids, call.weights, out), None)
        assert same_bits(outs[0], outs[1]), name
        assert same_bits(outs[0], outs[2]), name


STRESS = """
import torch
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata

layout, shape = BankLayout("octet32", Metadata.FOUR_BYTE, 32, True, True), BankShape(12, 2560, 160)
two, one = NativeBackend("qpn"), NativeBackend("qpn").configured(None, True, fused=True)
banks = [two.prepare(SyntheticLayer(12, 2560, 320, 32, 2, seed=s), layout, shape, "cuda:0") for s in (0, 1)]
calls = [Inputs.random(1, 10, hidden=2560, experts=12, seed=s, device="cuda:0") for s in (0, 1)]
wanted = []
for b, c in zip(banks, calls):
    wanted.append(torch.empty_like(c.x))
    two.run(b, Call(c.x, c.ids, c.weights, wanted[-1]))
outs = [torch.full((2000, *c.x.shape), torch.nan, dtype=torch.float16, device="cuda:0") for c in calls]
torch.cuda.synchronize()
{body}
torch.cuda.synchronize()
for out, right in zip(outs, wanted):
    assert (out.view(torch.int16) == right.view(torch.int16)).all()
print("right")
"""

ROW = """
for b, c, out in zip(banks, calls, outs):
    for row in out:
        one.run(b, Call(c.x, c.ids, c.weights, row))
"""

BESIDE = """
streams = [torch.cuda.Stream() for _ in range(3)]
a = torch.randn(2048, 2048, device="cuda:0", dtype=torch.float16)
for number in range(2000):
    for b, c, out, stream in zip(banks, calls, outs, streams):
        with torch.cuda.stream(stream):
            one.run(b, Call(c.x, c.ids, c.weights, out[number]))
    if number % 20 == 0:
        with torch.cuda.stream(streams[2]):
            torch.mm(a, a)
"""


@pytest.mark.parametrize("body", [ROW, BESIDE], ids=["in a row", "two layers and products beside each other"])
def test_thousands_of_calls(layers, body: str) -> None:
    """Four thousand calls end, and all are right: also where other work takes multiprocessors away meanwhile."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", STRESS.format(body=body)], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"a launch hangs: no end after {SECONDS} s")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "right"
