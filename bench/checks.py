"""What the decode kernels must show on a GPU, in one pass: bounds, bits, graphs, all versions alike."""

from __future__ import annotations

import math
import time

import torch
from banks import DEVICE, FIRST, Bank, Shape, slow
from driver import Cuda
from kernels import Decode

from sm70_moe.evidence.trial import Inputs, Trial
from sm70_moe.reference.arithmetic import AwqExpert, Reference

CHECKS: list[tuple[str, bool]] = []
EVERY_M = (1, 2, 3, 4, 5, 6, 7, 8)

GEOMETRIES = {
    "next32": Shape(2048, 128, 10, 64, 32),
    "next64": Shape(2048, 128, 10, 64, 64),
    "next128": Shape(2048, 128, 10, 64, 128),
    "qwen30": Shape(2048, 192, 8, 64, 32),
    "sample": Shape(256, 64, 4, 16, 32),
}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def random_call(shape: Shape, tokens: int, seed: int) -> Inputs:
    return Inputs.random(tokens, shape.top_k, hidden=shape.hidden, experts=shape.experts, seed=seed, device=DEVICE)


def mixed(shape: Shape, tokens: int, seed: int) -> Inputs:
    """Invalid ids, duplicates within a token and experts shared by several tokens."""
    call = random_call(shape, tokens, seed)
    source = torch.Generator().manual_seed(seed)
    few = torch.randint(0, shape.experts, (5,), generator=source)
    ids = few[torch.randint(0, 5, call.ids.shape, generator=source)].int()
    wrong = torch.rand(ids.shape, generator=source)
    ids[wrong < 0.1] = -1
    ids[wrong > 0.9] = shape.experts
    weights = torch.randn(ids.shape, generator=source)
    return Inputs(call.x, ids.to(DEVICE), weights.to(DEVICE))


def note(what: str, good: bool) -> None:
    CHECKS.append((what, good))
    if not good:
        print("WRONG", what, flush=True)


def check_bounds(name: str, decode: Decode, tokens: tuple[int, ...], factor: float) -> None:
    s = decode.bank.shape
    cache: dict[int, AwqExpert] = {}

    def read(expert: int) -> AwqExpert:
        if expert not in cache:
            cache[expert] = decode.bank.read(expert)
        return cache[expert]

    trial = Trial(name, "native", decode, Reference(read, s.experts), s.inner, factor=factor)
    for m in tokens:
        for kind, call in (("random", random_call(s, m, m)), ("mixed", mixed(s, m, 100 + m))):
            try:
                r = trial.judge(call)
            except Exception as error:
                note(f"{name} M={m} {kind}: {error}", False)
                raise
            print(
                f"  {name:24s} M={m} {kind:6s} w13 {r.w13:.4f} w2 {r.w2:.4f} out {r.out:.4f} exact {r.out_exact} "
                f"finite {r.finite} repeat {r.repeatable}",
                flush=True,
            )
            note(f"{name} M={m} {kind} bounds", r.ok)


def check_rows(name: str, decode: Decode) -> None:
    """M = 1 equals the row in any M; invalid; a bad row stays one bad row."""
    s = decode.bank.shape
    for kind, call in (("random", random_call(s, 8, 77)), ("mixed", mixed(s, 8, 78))):
        whole, inner = decode.once(call)
        for m in range(1, 8):
            for start in {0, 8 - m, 3 if m <= 5 else 0}:
                part = Inputs(*(t[start : start + m].contiguous() for t in (call.x, call.ids, call.weights)))
                out, inside = decode.once(part)
                note(
                    f"{name} {kind} rows {start}+{m} of 8",
                    same(out, whole[start : start + m]) and same(inside, inner[start : start + m]),
                )
        bad = call.x.clone()
        bad[2, 5] = math.inf
        bad[5, 7] = math.nan
        out, inside = decode.once(Inputs(bad, call.ids, call.weights))
        keep = torch.tensor([0, 1, 3, 4, 6, 7], device=DEVICE)
        note(f"{name} {kind} bad rows", same(out[keep], whole[keep]) and same(inside[keep], inner[keep]))
    for m in (1, 2, 3, 5, 8):
        call = random_call(s, m, 5)
        none = Inputs(call.x, torch.full_like(call.ids, -1), call.weights * math.nan)
        out, inside = decode.once(none)
        note(f"{name} no valid id M={m}", not bits(out).any() and not bits(inside).any())


def check_repeat(name: str, decode: Decode, times: int = 1000) -> None:
    for m in (1, 2, 4, 8):
        call = random_call(decode.bank.shape, m, 9)
        first, _ = decode.once(call)
        out = torch.empty_like(first)
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(times):
            out.fill_(math.nan)
            decode(call.x, call.ids, call.weights, out)
            differ += (bits(out) != bits(first)).sum()
        note(f"{name} {times} repeats M={m}", differ.item() == 0)


def check_graph(name: str, decode: Decode) -> None:
    """Eager equals replay, with other inputs and ids in the same buffers."""
    s = decode.bank.shape
    for m in (1, 3, 8):
        call = random_call(s, m, 1)
        out, inner = decode.once(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode(call.x, call.ids, call.weights, out, inner)
        for seed in range(2, 6):
            other = random_call(s, m, seed) if seed % 2 else mixed(s, m, seed)
            for to, new in ((call.x, other.x), (call.ids, other.ids), (call.weights, other.weights)):
                to.copy_(new)
            out.fill_(math.nan)
            inner.fill_(math.nan)
            graph.replay()
            expected, inside = decode.once(other)
            note(f"{name} graph M={m} seed {seed}", same(out, expected) and same(inner, inside))


def glance(name: str, decode: Decode) -> None:
    """A quick comparison that says where a wrong kernel is wrong."""
    s = decode.bank.shape
    for m in (1, 2, 8):
        call = random_call(s, m, m)
        out, inner = decode.once(call)
        torch.cuda.synchronize()
        good_out, good = torch.empty_like(out), torch.empty_like(inner)
        slow(decode.bank, call.x, call.ids, call.weights, good_out, good)
        for what, a, b in (("inner", inner, good), ("out", out, good_out)):
            off = ~((a.float() - b.float()).abs() <= 2e-3 * b.float().abs() + 2e-3 * b.float().abs().max())
            print(f"  glance {name} M={m} {what}: {int(off.sum())} of {off.numel()} off", flush=True)
            if off.any():
                where = off.nonzero()[:6].tolist()
                print(
                    "    ",
                    where,
                    [(float(a[tuple(w)]), float(b[tuple(w)])) for w in where],
                    "columns",
                    torch.bincount(off.nonzero()[:, -1] % 16, minlength=16).tolist(),
                    flush=True,
                )
                note(f"glance {name} M={m} {what}", False)


def alike(name: str, like: Decode, other: Decode) -> None:
    """Another version must give the same bits."""
    for m in EVERY_M:
        for call in (random_call(like.bank.shape, m, m), mixed(like.bank.shape, m, m)):
            (a, b), (c, d) = like.once(call), other.once(call)
            note(f"{name} M={m} alike", same(a, c) and same(b, d))


def quick(cuda: Cuda) -> None:
    """Enough to trust times."""
    base = Decode(cuda, "first", Bank(FIRST, 1, every=False))
    glance("own", base)
    check_rows("first", base)
    check_repeat("first", base, 50)


def check(cuda: Cuda) -> None:
    """Everything; takes about a minute."""
    start = time.time()
    bank = Bank(FIRST, 1, every=True)
    both = Decode(cuda, "first", bank), Decode(cuda, "first", bank, volta=True)
    for name, decode in zip(("first", "first volta"), both, strict=True):
        glance(name, decode)
        check_bounds(name, decode, EVERY_M, 2.0)
        check_rows(name, decode)
        check_graph(name, decode)
    check_repeat("first", both[0])
    runtime = Decode(cuda, "runtime", bank), Decode(cuda, "runtime", bank, volta=True)
    check_bounds("runtime", runtime[0], (1, 8), 2.0)
    check_rows("runtime", runtime[0])
    for order in (0, 1):
        for metadata in (4, 3, 2):
            for volta in (False, True):
                name = f"order {order} metadata {metadata} volta {volta}"
                for geometry in ("first",) if order == 0 else ("first", "runtime"):
                    other = Decode(cuda, geometry, bank, order=order, metadata=metadata, volta=volta)
                    alike(f"{geometry} {name}", both[volta], other)
    for one, other in zip(both, runtime, strict=True):
        alike("runtime", one, other)
    del bank, both, runtime
    for name, shape in GEOMETRIES.items():
        check_geometry(cuda, name, Bank(shape, 3, every=True))
    wrong = [what for what, good in CHECKS if not good]
    print(f"CHECKS {len(CHECKS)} wrong {len(wrong)} in {time.time() - start:.0f} s", wrong[:20], flush=True)


def check_geometry(cuda: Cuda, name: str, bank: Bank) -> None:
    one = Decode(cuda, name, bank)
    check_bounds(name, one, (1, 2, 5), 2.0)
    check_rows(name, one)
    for metadata in (3, 2):
        alike(f"{name} metadata {metadata}", one, Decode(cuda, name, bank, metadata=metadata))
    check_bounds(f"{name} volta", Decode(cuda, name, bank, volta=True), (1, 3), 2.0)
    alike(f"{name} by runtime", one, Decode(cuda, "runtime", bank))
    alike(f"{name} tiles by runtime", one, Decode(cuda, "runtime", bank, order=1, metadata=3))


def sanitize(cuda: Cuda) -> None:
    """A few calls for compute-sanitizer: every kernel, both steps, few experts."""
    for volta in (False, True):
        bank = Bank(Shape(2560, 160, 10, 16), 1, every=False)
        decode = Decode(cuda, "first", bank, volta=volta)
        for m in (1, 2, 4, 8):
            decode.once(mixed(bank.shape, m, m))
        torch.cuda.synchronize()
