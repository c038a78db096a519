"""Nine tokens and more, through the product's own layer on a GPU: right first, then timed in one run.

    python bench/batches.py OUT.json [SECONDS]

Plans come from AdmissionService, calls from MoELayer. Judged against FP64 on a sample of rows, computed on the GPU by
code of its own; then repeats, rows in other calls, graphs. Times: a graph of layers on banks in turn, a separating
kernel between them; the read-only roofline of the same bytes and torch's dense BF16 grouped product beside them.
Results are written as they come, and the process ends at its limit.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from banks import DEVICE, Bank, Shape
from driver import Cuda, Kernel
from kernels import FOLDER

from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.banks.banks import Bank as Matrix
from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.evidence.trial import Inputs
from sm70_moe.kernels.build import INSTALLED
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.steps import numbers
from sm70_moe.layout import BankShape
from sm70_moe.numbers.codes import Codes, ExpertCodes
from sm70_moe.plan.memory import backend
from sm70_moe.policy import load_policy
from sm70_moe.reference.arithmetic import Answer, combine, exact_step, silu
from sm70_moe.reference.bounds import judge_w13, out_ratios, worst
from sm70_moe.reference.rounding import FP16
from sm70_moe.runtime.arena import Arena
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import settings

SHAPES = {
    "first": Shape(2560, 160, 10, 512, 32),
    "qwen3-30b tp1": Shape(2048, 768, 8, 128, 128),
    "glm-4.5-air tp4": Shape(4096, 352, 8, 128, 32),
    "mixtral tp4": Shape(4096, 3584, 2, 8, 128),
    "deepseek-v2-lite tp2": Shape(2048, 704, 6, 64, 64),
    "minimax-m2 tp8": Shape(3072, 192, 8, 256, 64),
}
TOKENS = (9, 16, 64, 127, 128, 129, 1000, 6553, 6554, 8192)
TIMED = (16, 64, 128, 1024, 8192)
ROWS = 5
REPORT: dict[str, Any] = {"wrong": [], "checks": 0}
SEPARATOR = r"""
extern "C" __global__ void separate(const int* from_ids, const float* from_weights, int* ids, float* weights,
                                    int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) ids[i] = from_ids[i], weights[i] = from_weights[i];
}
"""


def note(what: str, good: bool) -> None:
    REPORT["checks"] += 1
    if not good:
        REPORT["wrong"].append(what)
        print("WRONG", what, flush=True)


def service_of(name: str, shape: Shape, **flags: str) -> tuple[AdmissionService, Any]:
    """A service and the facts of such a layer: the first contract's own policy, or the generic one."""
    service = AdmissionService(settings({**flags}, SM70_MOE_PERSISTENT_MAX_TOKENS="32"))
    facts = contract_facts(load_policy("qwen3.8-flash-next-awq-tp4"), device=f"{DEVICE}:0")
    if name != "first":
        sizes = {"hidden": shape.hidden, "intermediate": shape.inner, "experts": shape.experts, "top_k": shape.top_k}
        facts = replace(facts, **sizes, tensor_parallel=1, checkpoint_group=shape.group)
    return service, facts


PLANS: dict[object, Any] = {}


def plan_of(name: str, shape: Shape, **flags: str) -> Any:
    """Of one service each: its self-tests run once."""
    key = name, *sorted(flags.items())
    if key not in PLANS:
        service, facts = service_of(name, shape, **flags)
        began = time.monotonic()
        PLANS[key] = service.admit(facts)
        print(f"admitted in {time.monotonic() - began:.2f} s, self-tests included", flush=True)
    return PLANS[key]


def product_banks(bank: Bank, plan: Any) -> Banks:
    """The same bytes as the product's banks: the orders are equal, so nothing is packed."""
    s, kind = bank.shape, plan.layout.metadata.value
    assert (plan.layout.order, plan.layout.interleaved, plan.layout.group) == ("octet32", True, s.group)
    empty = allocate(plan.layout, BankShape(1, s.hidden, s.inner), f"{DEVICE}:0")
    made = {}
    for name, like in (("w13", empty.w13), ("w2", empty.w2)):
        found = bank.planes[name]
        planes = {"words": found["o0"]}
        planes |= {"metadata": found["o0.m4"].squeeze(-1)} if kind == "4-byte" else {"scales": found["scale"]}
        if kind != "4-byte":
            planes["zeros"] = found["zero"] if kind == "3-byte" else found["o0.m2"]
        planes = {n: p.reshape(s.experts, *like.planes[n].shape[1:]) for n, p in planes.items()}
        made[name] = Matrix(like.rows, like.columns, like.packing, like.stored, planes)
    shape = BankShape(s.experts, s.hidden, s.inner)
    return Banks(plan.layout, shape, empty.device, made["w13"], made["w2"], set(range(s.experts)))


class Source:
    """A bench bank as the weights of a checkpoint: what the product packs by itself, and proves."""

    def __init__(self, bank: Bank) -> None:
        self.bank, self.experts = bank, bank.shape.experts

    def read(self, expert: int, group: int) -> ExpertCodes:
        def codes(name: str, columns: slice) -> Codes:
            found = self.bank.planes[name]
            words = found["o0"][expert]
            nibbles = torch.stack([words >> 4 * (k // 2 + 4 * (k & 1)) & 15 for k in range(8)], -1)
            whole = nibbles.permute(1, 3, 4, 0, 2).reshape(words.shape[1] * 32, -1).to(torch.uint8)
            flat = (found[n][expert].transpose(0, 1).reshape(found[n].shape[2], -1) for n in ("zero", "scale"))
            return Codes(*(t[:, columns].contiguous().cpu() for t in (whole, *flat)))

        both = slice(None)
        return ExpertCodes(codes("w13", slice(0, None, 2)), codes("w13", slice(1, None, 2)), codes("w2", both))


def weights_of(bank: Bank, name: str, expert: int) -> torch.Tensor:
    """FP64 weights (K, N) of one expert, unpacked on the GPU by code of its own."""
    found = bank.planes[name]
    words, scale, zero = found["o0"][expert], found["scale"][expert].double(), found["zero"][expert].double()
    nibbles = torch.stack([words >> 4 * (k // 2 + 4 * (k & 1)) & 15 for k in range(8)], -1)
    codes = nibbles.permute(1, 3, 4, 0, 2).reshape(words.shape[1] * 32, -1).double()

    def wide(groups: torch.Tensor) -> torch.Tensor:  # octet, group, column -> K, N
        return groups.transpose(0, 1).reshape(groups.shape[1], -1).repeat_interleave(bank.shape.group, 0)

    bias = (-zero * scale).half().double()
    return (codes * wide(scale) + wide(bias)).half().double()


def answer_of(bank: Bank, call: Inputs, inner: torch.Tensor) -> Answer:
    """The FP64 answer of a few tokens; W2 of the given activations."""
    s, kind = bank.shape, FP16
    valid = (call.ids >= 0) & (call.ids < s.experts)
    widths = dict.fromkeys(("gate", "up", "gate_size", "up_size"), s.inner) | {"slots": s.hidden, "slot_size": s.hidden}
    made = {n: torch.zeros((*call.ids.shape, w), dtype=torch.float64, device=DEVICE) for n, w in widths.items()}
    for expert in call.ids[valid].unique().tolist():
        tokens, slots = (call.ids == expert).nonzero(as_tuple=True)
        w13, w2 = weights_of(bank, "w13", expert), weights_of(bank, "w2", expert)
        x, a = call.x[tokens].double(), inner[tokens, slots].double()
        both, size = x @ w13, x.abs() @ w13.abs()
        made["gate"][tokens, slots], made["up"][tokens, slots] = both[:, 0::2], both[:, 1::2]
        made["gate_size"][tokens, slots], made["up_size"][tokens, slots] = size[:, 0::2], size[:, 1::2]
        made["slots"][tokens, slots], made["slot_size"][tokens, slots] = a @ w2, a.abs() @ w2.abs()
    found, there = {name: t.cpu().numpy() for name, t in made.items()}, valid.cpu().numpy()
    gate, up = kind.round(found["gate"]), kind.round(found["up"])
    activations, products = kind.round(kind.round(silu(gate)) * up), kind.round(found["slots"])
    # of the exact slots: a route's slot is within its bound of them, not of the rounded ones
    total = combine(found["slots"], call.weights.double().cpu().numpy(), there, exact_step)
    return Answer(
        format=kind,
        valid=there,
        activations=activations,
        products=products,
        total=total,
        out=kind.round(total),
        **found,
    )


def routed(shape: Shape, tokens: int, kind: str, seed: int) -> Inputs:
    """uniform; one: every slot takes one expert; few: five experts; mixed: invalid ids among few; none: none valid."""
    source = torch.Generator(DEVICE).manual_seed(seed)
    size = tokens, shape.top_k
    x = torch.randn(tokens, shape.hidden, generator=source, device=DEVICE).half()
    ids = torch.rand(tokens, shape.experts, generator=source, device=DEVICE).topk(shape.top_k).indices.int()
    if kind in ("few", "mixed"):
        few = torch.randint(0, shape.experts, (5,), generator=source, device=DEVICE).int()
        ids = few[torch.randint(0, 5, size, generator=source, device=DEVICE)]
    if kind == "one":
        ids = torch.full_like(ids, shape.experts - 1)
    if kind == "none":
        ids = torch.where(ids % 2 == 0, -1, shape.experts).int()
    if kind == "mixed":
        wrong = torch.rand(size, generator=source, device=DEVICE)
        ids = torch.where(wrong < 0.1, -1, torch.where(wrong > 0.9, shape.experts, ids)).int()
    weights = torch.softmax(torch.randn(size, generator=source, device=DEVICE), -1)
    return Inputs(x, ids.contiguous(), weights)


def rows_of(call: Inputs, rows: torch.Tensor) -> Inputs:
    return Inputs(*(t[rows].contiguous() for t in (call.x, call.ids, call.weights)))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(torch.equal(first.view(torch.int16), second.view(torch.int16)))


@dataclass
class Subject:
    """One layer of the product on a bank of the bench."""

    name: str
    bank: Bank
    layer: MoELayer
    space: Arena

    @classmethod
    def of(cls, name: str, bank: Bank, space: Arena, **flags: str) -> Subject:
        plan = plan_of(name, bank.shape, **flags)
        runs = {route.backend: backend(plan.admission, route.backend) for route in plan.routes}
        space.reserve(plan.memory.resident)
        return cls(name, bank, MoELayer(plan, product_banks(bank, plan), runs, None, space), space)

    def route(self, tokens: int) -> Any:
        return self.layer.plan.reachable(tokens)[0]

    def once(self, call: Inputs) -> torch.Tensor:
        return self.layer(call.x, call.ids, call.weights, torch.full_like(call.x, math.nan))

    def inside(self, call: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The same call of the route's backend, with the activations given out."""
        s, out = self.bank.shape, torch.full_like(call.x, math.nan)
        inner = torch.full((len(call.x), s.top_k, s.inner), math.nan, dtype=torch.float16, device=DEVICE)
        runs = backend(self.layer.plan.admission, self.route(len(call.x)).backend)
        runs.run(self.layer.banks, Call(call.x, call.ids, call.weights, out, inner), self.space)
        return out, inner

    def check(self, tokens: int, kind: str) -> None:
        call, what = routed(self.bank.shape, tokens, kind, tokens), f"{self.name} M={tokens} {kind}"
        note(f"{what} route {self.route(tokens)}", "legacy" not in self.route(tokens).backend)
        out, (again, inner) = self.once(call), self.inside(call)
        chosen = torch.linspace(0, tokens - 1, min(ROWS, tokens)).round().long().to(DEVICE)
        few = rows_of(call, chosen)
        answer = answer_of(self.bank, few, inner[chosen])
        numbers = inner[chosen].double().cpu().numpy(), out[chosen].double().cpu().numpy()
        weights = few.weights.double().cpu().numpy()
        w13, total = judge_w13(answer, numbers[0], 2.0), worst(out_ratios(answer, numbers[1], weights, 2.0))
        valid = (call.ids >= 0) & (call.ids < self.bank.shape.experts)
        quiet = not bool(inner[~valid].view(torch.int16).any()) and not bool(out[~valid.any(1)].view(torch.int16).any())
        finite, repeat = bool(torch.isfinite(out).all() and torch.isfinite(inner).all()), same(out, again)
        good = w13 <= 1 and total <= 1 and finite and repeat and quiet
        note(f"{what}: w13 {w13:.3f} out {total:.3f} finite {finite} repeat {repeat} quiet {quiet}", good)
        most = REPORT.setdefault("bounds", {}).setdefault(self.name, [0.0, 0.0])
        most[:] = [max(most[0], w13), max(most[1], total)]
        if kind == "uniform":
            rows = torch.randperm(tokens, device=DEVICE)[: max(9, min(tokens // 2, 200))]
            note(f"{what}: rows in another call", same(self.once(rows_of(call, rows)), out[rows]))

    def check_graph(self, tokens: int) -> None:
        """Replays with other inputs in the same buffers equal eager calls."""
        s = self.bank.shape
        call = routed(s, tokens, "uniform", 1)
        out = self.once(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.layer(call.x, call.ids, call.weights, out)
        for seed, kind in enumerate(("uniform", "mixed", "one", "none", "few")):
            other = routed(s, tokens, kind, seed)
            for to, new in ((call.x, other.x), (call.ids, other.ids), (call.weights, other.weights)):
                to.copy_(new)
            out.fill_(math.nan)
            graph.replay()
            expected = out.clone()
            note(f"{self.name} graph M={tokens} {kind}", same(self.once(other), expected))

    def check_memory(self, tokens: int) -> None:
        """What a call takes is what the plan says."""
        call = routed(self.bank.shape, tokens, "uniform", 1)
        runs, out = backend(self.layer.plan.admission, self.route(tokens).backend), torch.empty_like(call.x)
        given = Call(call.x, call.ids, call.weights, out)
        runs.run(self.layer.banks, given)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # what is asked for: the allocator may hand out up to a megabyte more, where it does not part a block
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        runs.run(self.layer.banks, given)
        torch.cuda.synchronize()
        measured = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        stated = runs.workspace(self.layer.banks.shape, self.bank.shape.top_k, tokens)
        REPORT.setdefault("memory", {})[f"{self.name} M={tokens}"] = [stated, measured]
        note(f"{self.name} M={tokens} memory: stated {stated}, measured {measured}", measured <= stated)


def checks(name: str, space: Arena) -> None:
    subject = Subject.of(name, Bank(SHAPES[name], 1, True), space)
    print(name, [str(route) for route in subject.layer.plan.routes], subject.layer.plan.layout.tag, flush=True)
    for tokens in TOKENS:
        for kind in (
            ("uniform", "one", "mixed", "none") if name == "first" or tokens in (9, 64, 129) else ("uniform", "mixed")
        ):
            subject.check(tokens, kind)
    for tokens in (9, 128, 2000):
        subject.check_graph(tokens)
    for tokens in (16, 128, 1024, 8192):
        subject.check_memory(tokens)
    if name == "first":
        few = Subject.of(name, subject.bank, space, compact_metadata="0")
        assert few.layer.plan.layout.metadata != subject.layer.plan.layout.metadata
        for tokens in (9, 128, 1000):
            call = routed(subject.bank.shape, tokens, "uniform", 2)
            few.check(tokens, "mixed")
            note(f"{name} other metadata M={tokens}", same(few.once(call), subject.once(call)))
        long = routed(subject.bank.shape, 20_000, "uniform", 3)
        whole = subject.once(long)
        part = rows_of(long, torch.arange(13_000, 13_064, device=DEVICE))
        note(f"{name} 20,000 tokens in pieces", same(subject.once(part), whole[13_000:13_064]))


def product(name: str) -> None:
    """Everything as an engine has it: weights read, packed, proven on the layer's own banks, called."""
    bank = Bank(SHAPES[name], 1, True)
    service, facts = service_of(name, bank.shape)
    began = time.monotonic()
    layer = service.layer(facts, Source(bank), device=f"{DEVICE}:0")
    routes = [str(route) for route in layer.plan.routes]
    REPORT.setdefault("product", {})[name] = {"routes": routes, "seconds": time.monotonic() - began}
    space = Arena(f"{DEVICE}:0")
    other = Subject.of(name, bank, space)
    for tokens in (9, 128, 1000):
        call = routed(bank.shape, tokens, "uniform", 2)
        note(f"{name} product M={tokens} {routes}", same(layer(call.x, call.ids, call.weights), other.once(call)))


class Timer:
    """Layers of a graph, each with routing of its own, on banks in turn; a plain separating kernel between them."""

    def __init__(self, cuda: Cuda, subjects: list[Subject], tokens: int, layers: int) -> None:
        self.subjects, self.tokens, self.layers, self.shape = subjects, tokens, layers, subjects[0].bank.shape
        calls = [routed(self.shape, tokens, "uniform", 1000 + n) for n in range(layers)]
        self.from_ids, self.from_weights = torch.stack([c.ids for c in calls]), torch.stack([c.weights for c in calls])
        self.distinct = [c.ids.unique().contiguous() for c in calls]
        self.mean = statistics.mean(len(d) for d in self.distinct)
        self.x, self.ids, self.weights = calls[0].x, calls[0].ids.clone(), calls[0].weights.clone()
        self.out, self.sink = torch.full_like(self.x, torch.nan), torch.zeros(64, dtype=torch.int32, device=DEVICE)
        built = Cubins.open(INSTALLED)
        image = built.read(built.find("roofline", architecture(), {}, {}))
        self.roof = Kernel(cuda, cuda.module(image), "roofline_w13", "ppppiii")
        self.separate = Kernel(cuda, cuda.module((FOLDER / "separate.cubin").read_bytes()), "separate", "ppppi")

    def separator(self, n: int) -> None:
        count = self.ids.numel()
        given = self.from_ids[n], self.from_weights[n], self.ids, self.weights
        self.separate.launch((-(-count // 256),), 256, *(t.data_ptr() for t in given), count)

    def layer(self, n: int) -> None:
        self.separator(n)
        self.subjects[n % len(self.subjects)].layer(self.x, self.ids, self.weights, self.out)

    def roofline(self, n: int, threads: int) -> None:
        """Each different expert's bytes of both matrices in blocks of about six loads a thread."""
        self.separator(n)
        s, ids, bank = self.shape, self.distinct[n], self.subjects[n % len(self.subjects)].bank
        for name, size in (("w13", 2 * s.inner * s.hidden), ("w2", s.inner * s.hidden)):
            words, groups, _, _ = bank.addresses(name, 0, 4)
            total, more = size // 2, size // s.group * 4
            tiles = next(
                t
                for t in (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64, 80, 128, 160, 256, 320, 512, 640, 896, 1024)
                if total % (16 * t) == 0 and more % (16 * t) == 0 and (total + more) // t <= threads * 96
            )
            sizes = tiles, total // tiles, more // tiles
            self.roof.launch((tiles, len(ids)), threads, words, groups, ids.data_ptr(), self.sink.data_ptr(), *sizes)

    def dense(self) -> Callable[[int], None]:
        """The dense BF16 grouped product of the same slots (no gather, no sum), one bank of weights."""
        s, slots = self.shape, self.ids.numel()
        offsets = torch.bincount(self.from_ids[0].flatten().long(), minlength=s.experts).cumsum(0).int()
        kind = {"device": DEVICE, "dtype": torch.bfloat16}
        a, b = torch.randn(slots, s.hidden, **kind), torch.randn(slots, s.inner, **kind)
        w13, w2 = (
            torch.randn(s.experts, s.hidden, 2 * s.inner, **kind),
            torch.randn(s.experts, s.inner, s.hidden, **kind),
        )

        def run(n: int) -> None:
            self.separator(n)
            torch._grouped_mm(a, w13, offs=offsets)
            torch._grouped_mm(b, w2, offs=offsets)

        return run

    def time(self, layer: Callable[[int], None], samples: int = 7, budget: float = 0.12) -> tuple[float, float]:
        """Median and spread, in microseconds a layer."""
        layer(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for n in range(self.layers):
                layer(n)

        def replay(times: int) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(times):
                graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1000 / times

        replay(1)
        times = max(1, min(8, int(budget * 1e6 / samples / replay(1))))
        found = sorted(replay(times) / self.layers for _ in range(samples))
        return found[len(found) // 2], found[-1] - found[0]


def parts_of(subject: Subject, timer: Timer, tokens: int) -> dict[str, Any]:
    """Each kernel alone."""
    runs = backend(subject.layer.plan.admission, "indexed")
    bound = runs._bind(subject.layer.banks)
    case = Case(
        bound.shape, bound.layout, subject.bank.shape.top_k, tokens, bound.launcher.architecture, bound.dependent
    )
    lent = torch.empty(runs.workspace(bound.shape, case.top_k, tokens), dtype=torch.uint8, device=DEVICE)
    inner = lent.data_ptr() + -(-bound.route.lent(bound.shape, case.top_k, tokens) // 512) * 512
    found = {}
    every = bound.route.steps(case)
    for name in ("", "plan|count|list|place", "product", "sum"):
        chosen = [s for s in every if not name or any(word in s.kernel for word in name.split("|"))]
        program = bound.launcher.program(
            chosen, varying=bound.varying, values={**numbers(case), **bound.planes}, sizes=case.geometry.record()
        )

        def run(n: int, program: Any = program) -> None:
            timer.separator(n)
            given = (t.data_ptr() for t in (timer.x, timer.ids, timer.weights, timer.out))
            program(torch.cuda.current_stream().cuda_stream, *given, inner, lent.data_ptr())

        if name:
            found[name] = timer.time(run, samples=5, budget=0.05)[0]
        else:
            run(0)
    return found


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def times(cuda: Cuda, name: str, space: Arena, **flags: str) -> dict[str, Any]:
    shape, table = SHAPES[name], {}
    count = max(2, min(12, int(2e10 // (shape.experts * 3 * shape.hidden * shape.inner))))
    subjects = [Subject.of(name, Bank(shape, n, name == "first"), space, **flags) for n in range(count)]
    for m in TIMED:
        timer = Timer(cuda, subjects, m, 48 if m <= 128 else 16 if m <= 1024 else 6)
        row: dict[str, Any] = {
            "D": timer.mean,
            "separator": timer.time(timer.separator),
            "ours": timer.time(timer.layer),
        }
        if m <= 128:
            row["roofline"] = min(timer.time(lambda n, t=t, timer=timer: timer.roofline(n, t)) for t in (160, 256))
        if m >= 128:
            row["dense"] = timer.time(timer.dense())
        print(name, flags, subjects[0].layer.plan.layout.metadata.value, f"M={m}", row, flush=True)
        note(f"{name} M={m} outputs written", bool(torch.isfinite(timer.out).all()))
        row["parts"] = parts_of(subjects[0], timer, m)  # on whatever stands in scratch
        table[str(m)] = row
        torch.cuda.empty_cache()
    return table


def main(out: Path, limit: float) -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # a line a decision would hide the results
    start = time.monotonic()

    def stop() -> None:
        print("LIMIT", flush=True)
        write()
        os._exit(3)

    def write() -> None:
        out.write_text(json.dumps(REPORT, indent=1, default=str))

    timer = threading.Timer(limit, stop)
    timer.daemon = True
    timer.start()
    cuda, space = Cuda(), Arena(f"{DEVICE}:0")
    parts: list[tuple[str, Callable[[], Any]]] = [("checks first", lambda: checks("first", space))]
    parts += [("times first", lambda: times(cuda, "first", space, compact_metadata="0"))]
    parts += [(f"checks {name}", lambda name=name: checks(name, space)) for name in SHAPES if name != "first"]
    parts += [("times first 3-byte", lambda: times(cuda, "first", space))]
    parts += [("product deepseek", lambda: product("deepseek-v2-lite tp2")), ("product", lambda: product("first"))]
    parts += [(f"times {name}", lambda name=name: times(cuda, name, space)) for name in SHAPES if name != "first"]
    for name, part in parts:
        began = time.monotonic()
        try:
            REPORT[name] = part()
        except Exception as error:
            traceback.print_exc()
            REPORT["wrong"].append(f"{name}: {type(error).__name__}: {error}"[:300])
            if "illegal" in str(error) or "launch failure" in str(error):
                break
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.monotonic() - began:.1f} s, {time.monotonic() - start:.0f} s in all", flush=True)
        write()
    print(
        f"{REPORT['checks']} checks, wrong: {REPORT['wrong']}, bounds {REPORT.get('bounds')}",
        f"memory {REPORT.get('memory')}",
    )


if __name__ == "__main__":
    if sys.argv[1] == "compile":  # here: needs NVRTC, no GPU
        from sm70_moe.kernels.build.nvrtc import Compiler

        image = Compiler().compile("separate.cu", SEPARATOR, {}, ["--gpu-architecture=sm_90"])
        (FOLDER / "separate.cubin").write_bytes(image)
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))
