"""Checks and times the decode kernels on a GPU: `python bench/decode.py check time`, after `compile.py`.

Needs torch and numpy; the cubins of .bench/ are launched through libcuda, so that kernels can be tried
before a build holds them. Times are medians over graph replays of 48 layers, each behind the same plain
separating kernel (it writes ids and router weights); nothing here is a test.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".bench" / "snapshot" if (ROOT / ".bench" / "snapshot").exists() else ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from driver import Cuda, Kernel  # noqa: E402  # found beside this script

from sm70_moe.evidence.synthetic import pack as pack_awq  # noqa: E402
from sm70_moe.evidence.trial import Call, Trial  # noqa: E402
from sm70_moe.kernels.reference import AwqExpert, AwqMatrix, Reference  # noqa: E402
from sm70_moe.weights import octets  # noqa: E402

FOLDER = Path(__file__).resolve().parents[1] / ".bench"
KINDS13, KINDS2 = "pp" + "pppp" + "p" + "iiiiii", "ppp" + "pppp" + "p" + "iiiiii"
LAYERS = 48
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    top_k: int
    experts: int
    group: int = 32


FIRST = Shape(2560, 160, 10, 512)


def up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Plan:
    """Threads and grids, as the sources compute them."""

    shape: Shape
    volta: bool
    special: bool
    warps: dict[int, int]
    most: int = 0  # tokens of a W2 block, where not chosen by the number of tokens

    def w13(self, tokens: int) -> tuple[str, tuple[int, int], int]:
        warps = min(16, up(self.shape.hidden // 32, 16)) if self.special else 8
        return f"w13_{1 if tokens == 1 else 8}", (self.shape.inner // 4, tokens * self.shape.top_k), 32 * warps

    def w2(self, tokens: int) -> tuple[str, tuple[int, int], int]:
        """Kernel, grid, threads."""
        most = self.most or (1 if tokens == 1 else 2 if tokens == 2 else 4)
        name = "w2_8" if tokens > 4 and not self.most else f"w2_{most}"
        grid = self.shape.hidden // 8, up(tokens, most)
        if not self.special:
            return name, grid, 256
        units, slots = self.shape.inner // 32, most * self.shape.top_k
        runs = up(units, up(units, 8))
        places = 4 if self.volta else 8
        if not self.volta and units <= 8 and most <= 2 and up(slots * runs, 8) <= 16:
            return name, grid, 32 * up(slots * runs, 8)
        groups = up(slots, places)
        warps = self.warps.get(most) or ((16 if most == 4 else 10) if self.volta else 5 if most == 4 else 16)
        return name, grid, 32 * groups * max(1, min(warps // groups, runs))


class Bank:
    """Both matrices of random experts, in every order and kind of metadata."""

    def __init__(self, shape: Shape, seed: int, every: bool) -> None:
        self.shape = shape
        source = torch.Generator(DEVICE).manual_seed(seed)
        h, i = shape.hidden, shape.inner
        self.planes = {
            "w13": self.matrix(source, h, 2 * i, every),
            "w2": self.matrix(source, i, h, every),
        }

    def matrix(self, source: torch.Generator, k: int, n: int, every: bool) -> dict[str, torch.Tensor]:
        e, g = self.shape.experts, self.shape.group
        made = {}

        def draw(low: int, high: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.randint(low, high, size, generator=source, device=DEVICE, dtype=dtype)

        made["o0"] = draw(-(2**31), 2**31, (e, n // 8, k // 32, 8, 4), torch.int32)
        spread = torch.rand((e, n // 8, k // g, 8), generator=source, device=DEVICE) + 0.5
        sign = torch.where(torch.rand(spread.shape, generator=source, device=DEVICE) < 0.125, -1.0, 1.0)
        scale = (sign * spread / (6.5 * math.sqrt(k))).half()
        zero = draw(0, 16, spread.shape, torch.uint8)
        made["scale"], made["zero"] = scale, zero
        bias = (-zero.float() * scale.float()).half()
        made["o0.m4"] = torch.stack((scale, bias), -1).view(torch.int32).squeeze(-1)
        if every:
            nibbles = torch.zeros(zero.shape[:-1], dtype=torch.int64, device=DEVICE)
            for c in range(8):
                nibbles |= zero[..., c].long() << (4 * c)
            made["o0.m2"] = (nibbles - ((nibbles >> 31) << 32)).int()

            def plain(groups: torch.Tensor) -> torch.Tensor:  # (e, n/8, k/g, 8) -> (e, k/g, n)
                return groups.transpose(1, 2).reshape(e, k // g, n).contiguous()

            width = up(n, 32) * 32
            words = made["o0"].permute(0, 2, 4, 1, 3).reshape(e, k // 8, n)  # K/8, column
            words = torch.nn.functional.pad(words, (0, width - n)).view(e, k // 8, width // 32, 32)
            made["o1"] = words.transpose(1, 2).contiguous()
            made["o1.m4"] = plain(made["o0.m4"])
            made["o1.scale"] = plain(scale)
            made["o1.m3"] = torch.cat((made["o1.scale"].unsqueeze(-1).view(torch.uint8), plain(zero).unsqueeze(-1)), -1)
            made["o1.m2"] = made["o0.m2"].transpose(1, 2).contiguous()
        return made

    def addresses(self, name: str, order: int, metadata: int) -> tuple[int, int, int, int]:
        found = self.planes[name]
        scale = found["scale"] if order == 0 else found.get("o1.scale")
        whole = found[f"o{order}.m4"] if metadata == 4 else found["o1.m3"] if order and metadata == 3 else None
        zeros = found["zero"] if metadata == 3 else found[f"o{order}.m2"] if metadata == 2 else None
        if metadata == 4 or whole is not None:
            scale = zeros = None
        return tuple(0 if t is None else t.data_ptr() for t in (found[f"o{order}"], whole, scale, zeros))

    def decoded(self, name: str, expert: int) -> torch.Tensor:
        """FP16 weights (K, N) of one expert."""
        found = self.planes[name]
        n = found["o0"].shape[1] * 8
        codes = octets.PACKING.unpack(found["o0"][expert].cpu(), n).T.float()
        scale = octets.restore(found["scale"][expert].cpu()).float()
        bias = (-octets.restore(found["zero"][expert].cpu()).float() * scale).half().float()
        g = self.shape.group
        return (codes * scale.repeat_interleave(g, 0) + bias.repeat_interleave(g, 0)).half().to(DEVICE)

    def read(self, expert: int) -> AwqExpert:
        """As a checkpoint has it, through the package's own unpacking."""
        h, i = self.shape.hidden, self.shape.inner

        def split(name: str, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            found = self.planes[name]
            codes = octets.PACKING.unpack(found["o0"][expert].cpu(), n).numpy().astype(np.uint8).T
            zeros = octets.restore(found["zero"][expert].cpu()).numpy()
            return codes, zeros, octets.restore(found["scale"][expert].cpu()).numpy()

        def matrix(parts: tuple[np.ndarray, ...], columns: slice) -> AwqMatrix:
            codes, zeros, scales = (np.ascontiguousarray(p[:, columns]) for p in parts)
            return AwqMatrix(pack_awq(codes), pack_awq(zeros), scales, self.shape.group)

        both, down = split("w13", 2 * i), split("w2", h)
        return AwqExpert(matrix(both, slice(0, None, 2)), matrix(both, slice(1, None, 2)), matrix(down, slice(None)))


class Decode:
    """Kernels of one version, bound to a bank."""

    def __init__(
        self,
        cuda: Cuda,
        geometry: str,
        order: int,
        metadata: int,
        volta: bool,
        bank: Bank,
        variants: tuple[str, str] = ("", ""),
        dependent: bool = True,
        carveout: int | None = None,
        most: int = 0,
    ) -> None:
        self.bank, self.order, self.metadata, self.dependent = bank, order, metadata, dependent
        tag = f"{geometry}.o{order}.m{metadata}.s{int(volta)}"
        files = [
            f"{source}.{geometry}.{v}" if v else f"{source}.{tag}"
            for source, v in zip(("decode_w13", "decode_w2"), variants, strict=True)
        ]
        modules = [cuda.module((FOLDER / f"{name}.cubin").read_bytes()) for name in files]
        table = json.loads((Path(__file__).parent / "variants.json").read_text())["decode_w2"].get(variants[1], {})
        text = table.get("W2_WARPS")
        warps = {m: eval(c_to_python(text), {"TOKENS": m}) for m in (1, 2, 4)} if text else {}
        self.plan = Plan(bank.shape, volta, geometry != "runtime", warps, most)
        self.kernels = {f"w13_{m}": Kernel(cuda, modules[0], f"w13_{m}", KINDS13, carveout) for m in (1, 8)}
        self.kernels |= {f"w2_{m}": Kernel(cuda, modules[1], f"w2_{m}", KINDS2, carveout) for m in (1, 2, 4, 8)}

    def sizes(self, x: torch.Tensor) -> tuple[int, ...]:
        s = self.bank.shape
        return x.shape[0], s.top_k, s.hidden, s.inner, s.experts, s.group

    def w13(self, x: torch.Tensor, ids: torch.Tensor, inner: torch.Tensor, bank: Bank | None = None) -> None:
        name, grid, threads = self.plan.w13(x.shape[0])
        planes = (bank or self.bank).addresses("w13", self.order, self.metadata)
        self.kernels[name].launch(
            grid, threads, x.data_ptr(), ids.data_ptr(), *planes, inner.data_ptr(), *self.sizes(x)
        )

    def w2(
        self, inner: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, bank: Bank | None = None
    ) -> None:
        name, grid, threads = self.plan.w2(out.shape[0])
        planes = (bank or self.bank).addresses("w2", self.order, self.metadata)
        self.kernels[name].launch(
            grid,
            threads,
            inner.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            *planes,
            out.data_ptr(),
            *self.sizes(out),
            dependent=self.dependent,
        )

    def __call__(self, x, ids, weights, out, intermediate=None) -> None:  # type: ignore[no-untyped-def]
        s = self.bank.shape
        inner = intermediate
        if inner is None:
            inner = torch.full((x.shape[0], s.top_k, s.inner), math.nan, dtype=torch.float16, device=DEVICE)
        self.w13(x, ids, inner)
        self.w2(inner, ids, weights, out)

    def once(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.bank.shape
        out = torch.full_like(call.x, math.nan)
        inner = torch.full((call.tokens, s.top_k, s.inner), math.nan, dtype=torch.float16, device=DEVICE)
        self(call.x, call.ids, call.weights, out, inner)
        return out, inner


def c_to_python(text: str) -> str:
    """`a ? b : c` chains of variants.json."""
    text = text.strip().removeprefix("(").removesuffix(")")
    head, question, rest = text.partition("?")
    if not question:
        return text
    value, _, other = rest.partition(":")
    return f"({value}) if ({head}) else ({c_to_python(other)})"


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def random_call(shape: Shape, tokens: int, seed: int) -> Call:
    return Call.random(tokens, shape.top_k, hidden=shape.hidden, experts=shape.experts, seed=seed, device=DEVICE)


def mixed(shape: Shape, tokens: int, seed: int) -> Call:
    """Invalid ids, duplicates within a token and experts shared by several tokens."""
    call = random_call(shape, tokens, seed)
    source = torch.Generator().manual_seed(seed)
    few = torch.randint(0, shape.experts, (5,), generator=source)
    ids = few[torch.randint(0, 5, call.ids.shape, generator=source)].int()
    wrong = torch.rand(ids.shape, generator=source)
    ids[wrong < 0.1] = -1
    ids[wrong > 0.9] = shape.experts
    weights = torch.randn(ids.shape, generator=source)
    return Call(call.x, ids.to(DEVICE), weights.to(DEVICE))


CHECKS: list[tuple[str, bool]] = []


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
                part = Call(*(t[start : start + m].contiguous() for t in (call.x, call.ids, call.weights)))
                out, inside = decode.once(part)
                note(
                    f"{name} {kind} rows {start}+{m} of 8",
                    same(out, whole[start : start + m]) and same(inside, inner[start : start + m]),
                )
        bad = call.x.clone()
        bad[2, 5] = math.inf
        bad[5, 7] = math.nan
        out, inside = decode.once(Call(bad, call.ids, call.weights))
        keep = torch.tensor([0, 1, 3, 4, 6, 7], device=DEVICE)
        note(f"{name} {kind} bad rows", same(out[keep], whole[keep]) and same(inside[keep], inner[keep]))
    for m in (1, 2, 3, 5, 8):
        call = random_call(s, m, 5)
        none = Call(call.x, torch.full_like(call.ids, -1), call.weights * math.nan)
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


def quick(cuda: Cuda) -> None:
    """Enough to trust times."""
    start = time.time()
    bank = Bank(FIRST, 1, every=False)
    base = Decode(cuda, "first", 0, 4, False, bank)
    glance("own", base)
    check_rows("first", base)
    check_repeat("first", base, 50)
    for source, found in json.loads((Path(__file__).parent / "variants.json").read_text()).items():
        for v, macros in found.items():
            if "SKIP" not in macros:
                check_alike(
                    cuda, f"{source} {v}", base, "first", 0, 4, False, (v, "") if source == "decode_w13" else ("", v)
                )
    print(f"quick {len(CHECKS)} wrong {sum(not good for _, good in CHECKS)} in {time.time() - start:.0f} s", flush=True)


def check(cuda: Cuda) -> None:
    start = time.time()
    bank = Bank(FIRST, 1, every=True)
    base = Decode(cuda, "first", 0, 4, False, bank)
    volta = Decode(cuda, "first", 0, 4, True, bank)
    for name, decode in (("own", base), ("volta", volta)):
        glance(name, decode)
    check_bounds("first", base, (1, 2, 3, 4, 5, 8), 2.0)
    check_rows("first", base)
    check_repeat("first", base)
    check_graph("first", base)
    check_bounds("first volta", volta, (1, 2, 4, 8), 2.0)
    check_rows("first volta", volta)
    print(f"  checked {len(CHECKS)} in {time.time() - start:.0f} s", flush=True)
    for order in (0, 1):
        for metadata in (4, 3, 2):
            for step, like in ((0, base), (1, volta)):
                check_alike(cuda, f"o{order} m{metadata} s{step}", like, "first", order, metadata, bool(step))
    for source, found in json.loads((Path(__file__).parent / "variants.json").read_text()).items():
        for v, macros in found.items():
            if "SKIP" in macros:
                continue
            pair = (v, "") if source == "decode_w13" else ("", v)
            check_alike(cuda, f"{source} {v}", base, "first", 0, 4, False, pair)
    runtime = Decode(cuda, "runtime", 0, 4, False, bank)
    check_bounds("runtime", runtime, (1, 8), 2.0)
    check_rows("runtime", runtime)
    for order, metadata, step in ((0, 3, 0), (0, 2, 0), (1, 4, 0), (0, 4, 1)):
        check_alike(
            cuda,
            f"runtime o{order} m{metadata} s{step}",
            volta if step else base,
            "runtime",
            order,
            metadata,
            bool(step),
        )
    del bank
    for name, shape in GEOMETRIES.items():
        small = Bank(shape, 3, every=True)
        one = Decode(cuda, name, 0, 4, False, small)
        check_bounds(name, one, (1, 2, 5), 2.0)
        check_rows(name, one)
        for order, metadata in ((0, 3), (0, 2), (1, 3)):
            check_alike(cuda, f"{name} o{order} m{metadata}", one, name, order, metadata, False)
        check_bounds(f"{name} volta", Decode(cuda, name, 0, 4, True, small), (1, 3), 2.0)
        check_alike(cuda, f"{name} by runtime", one, "runtime", 0, 4, False)
    wrong = [what for what, good in CHECKS if not good]
    print(f"CHECKS {len(CHECKS)} wrong {len(wrong)} in {time.time() - start:.0f} s", wrong[:20], flush=True)


GEOMETRIES = {
    "next32": Shape(2048, 128, 10, 64, 32),
    "next64": Shape(2048, 128, 10, 64, 64),
    "next128": Shape(2048, 128, 10, 64, 128),
    "qwen30": Shape(2048, 192, 8, 64, 32),
    "sample": Shape(256, 64, 4, 16, 32),
}


def check_alike(
    cuda: Cuda,
    name: str,
    like: Decode,
    geometry: str,
    order: int,
    metadata: int,
    volta: bool,
    variants: tuple[str, str] = ("", ""),
) -> None:
    """Another version must give the same bits."""
    if not all(
        (FOLDER / f"{s}.{geometry}.{v or f'o{order}.m{metadata}.s{int(volta)}'}.cubin").exists()
        for s, v in zip(("decode_w13", "decode_w2"), variants, strict=True)
    ):
        note(f"{name}: not compiled", False)
        return
    alike(name, like, Decode(cuda, geometry, order, metadata, volta, like.bank, variants))


def alike(name: str, like: Decode, other: Decode) -> None:
    for m in (1, 2, 3, 4, 6, 8):
        for call in (random_call(like.bank.shape, m, m), mixed(like.bank.shape, m, m)):
            (a, b), (c, d) = like.once(call), other.once(call)
            note(f"{name} M={m} alike", same(a, c) and same(b, d))


# --- time ------------------------------------------------------------------------------------------


class Bench:
    """48 layers in a graph, each on a bank of its own, and expert sets that never repeat."""

    def __init__(self, cuda: Cuda, banks: list[Bank], tokens: int, routing: str = "uniform") -> None:
        self.cuda, self.banks, self.tokens = cuda, banks, tokens
        s = banks[0].shape
        self.shape = s
        source = np.random.default_rng(tokens)
        tables = []
        for _ in range(LAYERS):
            if routing == "uniform":
                ids = np.stack([source.permutation(s.experts)[: s.top_k] for _ in range(tokens)])
            else:  # all tokens take the same experts
                ids = np.stack([source.permutation(s.experts)[: s.top_k]] * tokens)
            tables.append(ids.astype(np.int32))
        self.distinct = [np.unique(t) for t in tables]
        self.most_distinct = max(len(d) for d in self.distinct)
        self.mean = statistics.mean(len(d) for d in self.distinct)
        most = tokens * s.top_k
        padded = [np.pad(d, (0, most - len(d))) for d in self.distinct]
        self.from_ids = torch.tensor(np.stack(tables).reshape(LAYERS, -1)).to(DEVICE)
        self.from_distinct = torch.tensor(np.stack(padded)).int().to(DEVICE)
        self.from_weights = torch.softmax(torch.randn(LAYERS, tokens, s.top_k), -1).to(DEVICE).view(LAYERS, -1)
        self.ids = torch.zeros(tokens, s.top_k, dtype=torch.int32, device=DEVICE)
        self.weights = torch.zeros(tokens, s.top_k, device=DEVICE)
        self.x = torch.randn(tokens, s.hidden, device=DEVICE).half()
        self.inner = torch.full((tokens, s.top_k, s.inner), math.nan, dtype=torch.float16, device=DEVICE)
        self.out = torch.full((tokens, s.hidden), math.nan, dtype=torch.float16, device=DEVICE)
        self.sink = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        module = cuda.module((FOLDER / "roofline.cubin").read_bytes())
        self.roof13 = Kernel(cuda, module, "roofline_w13", "ppppiii")
        self.roof2 = {n: Kernel(cuda, module, f"roofline_w2_{n}", "ppppiiii") for n in (1, 2, 4, 8)}
        self.separate = Kernel(cuda, module, "separator", "ppppi")
        self.nothing = Kernel(cuda, module, "nothing", "")

    def separator(self, layer: int, distinct: bool = False) -> None:
        ids = (self.from_distinct if distinct else self.from_ids)[layer]
        self.separate.launch(
            (1,),
            128,
            ids.data_ptr(),
            self.from_weights[layer].data_ptr(),
            self.ids.data_ptr(),
            self.weights.data_ptr(),
            ids.numel(),
        )

    def bank(self, layer: int) -> Bank:
        return self.banks[layer % len(self.banks)]

    def roofline13(self, layer: int, pair: int, wide: int = 160) -> None:
        s = self.shape
        words, groups, _, _ = self.bank(layer).addresses("w13", 0, 4)
        tiles, units = 2 * s.inner // 8 // pair, s.hidden // 32
        self.roof13.launch(
            (tiles, len(self.distinct[layer])),
            wide * pair,
            words,
            groups,
            self.ids.data_ptr(),
            self.sink.data_ptr(),
            tiles,
            units * 128 * pair,
            units * 32 * pair,
        )

    def roofline2(self, layer: int, threads: int, dependent: bool, split: int = 1) -> None:
        s = self.shape
        words, groups, _, _ = self.bank(layer).addresses("w2", 0, 4)
        tiles, units = s.hidden // 8, s.inner // 32
        loads, count = units * 10, len(self.distinct[layer])
        at_once = threads // loads
        each = next(n for n in (1, 2, 4, 8, 16) if n * at_once * split >= self.most_distinct)
        self.roof2[each].launch(
            (tiles, split),
            at_once * loads,
            words,
            groups,
            self.ids.data_ptr(),
            self.sink.data_ptr(),
            tiles,
            units * 128,
            units * 32,
            count,
            dependent=dependent,
        )

    def time(self, layer: Callable[[int], None], samples: int = 9, replays: int = 8) -> tuple[float, float]:
        """Median and spread, in microseconds a layer."""
        layer(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for n in range(LAYERS):
                layer(n)
        for _ in range(3):
            graph.replay()
        found = []
        for _ in range(samples):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / replays / LAYERS)
        return statistics.median(found), max(found) - min(found)


def arms(cuda: Cuda, bench: Bench, which: str) -> Iterator[tuple[str, Callable[[int], None]]]:
    b = bench

    def separator(n: int) -> None:
        b.separator(n)

    def floor(n: int) -> None:
        b.separator(n)
        b.nothing.launch((1,), 32)
        b.nothing.launch((1,), 32)

    def roof(
        pair: int, threads: int, dependent: bool, parts: str = "both", split: int = 1, wide: int = 160
    ) -> Callable[[int], None]:
        def run(n: int) -> None:
            b.separator(n, distinct=True)
            if parts != "w2":
                b.roofline13(n, pair, wide)
            if parts != "w13":
                b.roofline2(n, threads, dependent, split)

        return run

    def ours(decode: Decode, dependent: bool, parts: str = "both") -> Callable[[int], None]:
        def run(n: int) -> None:
            decode.dependent = dependent
            b.separator(n)
            if parts != "w2":
                decode.w13(b.x, b.ids, b.inner, b.bank(n))
            if parts != "w13":
                decode.w2(b.inner, b.ids, b.weights, b.out, b.bank(n))

        return run

    yield "separator", separator
    yield "floor: two empty kernels", floor
    for threads in (128, 256, 512):
        for split in (1, 2, 4):
            if threads // 50 * split * 8 >= b.most_distinct and split <= b.tokens:
                yield f"roof t{threads} s{split} plain", roof(1, threads, False, split=split)
                yield f"roof t{threads} s{split} w2 only", roof(1, threads, False, "w2", split)
    yield "roof dependent", roof(1, 512 if b.tokens > 1 else 256, True, split=max(1, b.tokens // 4))
    for wide in (200, 400):
        threads, split = (128, 1) if b.tokens == 1 else (256, max(1, b.tokens // 4))
        yield f"roof t{threads} s{split} w{wide} plain", roof(1, threads, False, split=split, wide=wide)
    for wide in (160, 200, 400):
        yield f"roof w13 {wide} only", roof(1, 256, False, "w13", wide=wide)
    variants = json.loads((Path(__file__).parent / "variants.json").read_text())
    base = Decode(cuda, "first", 0, 4, False, b.banks[0])
    yield "ours plain", ours(base, False)
    yield "ours dependent", ours(base, True)
    yield "ours w13 only", ours(base, False, "w13")
    yield "ours w2 only", ours(base, False, "w2")
    for v in variants["decode_w13"]:
        d = Decode(cuda, "first", 0, 4, False, b.banks[0], (v, ""))
        yield f"w13 {v} only", ours(d, False, "w13")
        yield f"w13 {v} dependent", ours(d, True)
    for v in variants["decode_w2"]:
        d = Decode(cuda, "first", 0, 4, False, b.banks[0], ("", v))
        yield f"w2 {v} only", ours(d, False, "w2")
        yield f"w2 {v} dependent", ours(d, True)
    for carveout in (7, 14, 28):
        d = Decode(cuda, "first", 0, 4, False, b.banks[0], carveout=carveout)
        yield f"carveout {carveout} plain", ours(d, False)
        yield f"carveout {carveout} dependent", ours(d, True)
    for most in (1, 2):
        if most < b.tokens:
            d = Decode(cuda, "first", 0, 4, False, b.banks[0], most=most)
            yield f"w2 by {most} only", ours(d, False, "w2")
            yield f"w2 by {most} dependent", ours(d, True)


def measure(cuda: Cuda, which: str) -> None:
    banks = [Bank(FIRST, 10 + n, every=False) for n in range(12)]
    table: dict[str, dict[int, float]] = {}
    for tokens in (1, 2, 4, 8):
        bench = Bench(cuda, banks, tokens)
        gigabytes = bench.mean * 768_000 / 1e9
        print(f"M={tokens} D={bench.mean:.1f} bytes {gigabytes * 1e3:.2f} MB", flush=True)
        for name, layer in arms(cuda, bench, which):
            median, spread = bench.time(layer)
            table.setdefault(name, {})[tokens] = median
            print(f"   {name:32s} {median:7.2f} +-{spread:5.2f}", flush=True)
        note(f"M={tokens} outputs written", bool(torch.isfinite(bench.out).all()))
    roofs = {
        m: min(t[m] for n, t in table.items() if n.startswith("roof") and n.endswith("plain") and m in t)
        for m in (1, 2, 4, 8)
    }
    print("\nus per layer (ratio to the fastest plain roofline of this run)")
    for name, row in table.items():
        cells = (f" {row[m]:7.2f} {row[m] / roofs[m]:5.2f}x" if m in row else " " * 15 for m in roofs)
        print(f"{name:32s}" + "".join(cells))


def profile(cuda: Cuda) -> None:
    """One call at each M, for ncu."""
    bank = Bank(FIRST, 1, every=False)
    decode = Decode(cuda, "first", 0, 4, False, bank, dependent=False)
    for m in (1, 4, 8):
        decode.once(random_call(FIRST, m, m))
    torch.cuda.synchronize()


def rehearse() -> None:
    """Without a GPU: everything around the kernels, with the kernels' part done in torch."""
    shape = Shape(256, 64, 4, 16)
    bank = Bank(shape, 1, every=True)

    def run(x, ids, weights, out, intermediate=None):  # type: ignore[no-untyped-def]
        slow(bank, x, ids, weights, out, intermediate)

    for kind in (random_call, mixed):
        print(Trial("rehearsal", "torch", run, Reference(bank.read, 16), 64, factor=2.0).judge(kind(shape, 3, 1)))


def slow(
    bank: Bank,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    intermediate: torch.Tensor | None = None,
) -> None:
    """The contract's arithmetic in FP64, one slot after the other."""
    out.zero_()
    for t in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < bank.shape.experts:
                if intermediate is not None:
                    intermediate[t, k] = 0
                continue
            both = (x[t].double() @ bank.decoded("w13", e).double()).half()
            gate, up_ = both[0::2], both[1::2]
            inner = torch.nn.functional.silu(gate.float()).half() * up_
            if intermediate is not None:
                intermediate[t, k] = inner
            slot = (inner.double() @ bank.decoded("w2", e).double()).half()
            total = (weights[t, k].double() * slot.double() + total.double()).float()
        out[t] = total.half()


def section(work: Callable[[], None]) -> None:
    """One part must not stop the others: time on the device is short."""
    try:
        work()
    except Exception:
        traceback.print_exc()
        note(f"{work}", False)


def main() -> None:
    if DEVICE == "cpu":
        return rehearse()
    cuda = Cuda()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if "quick" in sys.argv:
        section(lambda: quick(cuda))
    if "check" in sys.argv:
        section(lambda: check(cuda))
    if "time" in sys.argv:
        section(lambda: measure(cuda, "all"))
    if "profile" in sys.argv:
        profile(cuda)
    if any(not good for _, good in CHECKS):
        sys.exit(1)


if __name__ == "__main__":
    main()
