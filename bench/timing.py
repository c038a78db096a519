"""Times of a layer on a GPU, in graphs of 48 layers; see `Bench`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from banks import DEVICE, FIRST, Bank
from checks import note
from driver import Cuda, Kernel
from kernels import FOLDER, Decode

LAYERS = 48
Layer = Callable[[int], None]


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
        self.tiles2 = Kernel(cuda, module, "roofline_w2_tiles", "ppppiii")
        self.separate = Kernel(cuda, module, "separator", "ppppi")
        self.separate_early = Kernel(cuda, module, "separator_early", "ppppi")
        self.early = False  # which of the two
        self.nothing = Kernel(cuda, module, "nothing", "")

    def separator(self, layer: int, distinct: bool = False) -> None:
        ids = (self.from_distinct if distinct else self.from_ids)[layer]
        (self.separate_early if self.early else self.separate).launch(
            (1,),
            128,
            ids.data_ptr(),
            self.from_weights[layer].data_ptr(),
            self.ids.data_ptr(),
            self.weights.data_ptr(),
            ids.numel(),
        )

    def split(self, percent: int) -> None:
        """Ask for this share of shared memory in the separator and the rooflines."""
        for kernel in (self.separate, self.roof13, *self.roof2.values()):
            kernel.prefer(percent)

    def bank(self, layer: int) -> Bank:
        return self.banks[layer % len(self.banks)]

    def roofline13(self, layer: int, threads: int) -> None:
        s = self.shape
        words, groups, _, _ = self.bank(layer).addresses("w13", 0, 4)
        tiles, units = 2 * s.inner // 8, s.hidden // 32
        self.roof13.launch(
            (tiles, len(self.distinct[layer])),
            threads,
            words,
            groups,
            self.ids.data_ptr(),
            self.sink.data_ptr(),
            tiles,
            units * 128,
            units * 32,
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
        layer(0)  # whatever happens once, happens now
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


def rooflines(b: Bench) -> Iterator[tuple[str, Layer]]:
    """The same bytes in two plain launches, in several shapes: the fastest counts."""

    def roof(threads: int, wide: int, split: int, dependent: bool, parts: str) -> Layer:
        def run(n: int) -> None:
            b.separator(n, distinct=True)
            if parts != "w2":
                b.roofline13(n, wide)
            if parts != "w13":
                b.roofline2(n, threads, dependent, split)

        return run

    best = {1: (128, 1), 2: (256, 1), 4: (256, 1), 8: (256, 2)}[b.tokens]
    for threads, split in {best, (512, max(1, b.tokens // 4))}:
        for wide in (160, 200, 400):
            yield f"roof t{threads} s{split} w{wide} plain", roof(threads, wide, split, False, "both")
    yield "roof dependent", roof(best[0], 200, best[1], True, "both")
    yield "roof w13 only", roof(best[0], 200, best[1], False, "w13")
    yield "roof w2 only", roof(best[0], 200, best[1], False, "w2")


def ours(b: Bench, decode: Decode, dependent: bool, parts: str = "both") -> Layer:
    def run(n: int) -> None:
        decode.dependent = dependent
        b.separator(n)
        if parts != "w2":
            decode.w13(b.x, b.ids, b.inner, b.bank(n))
        if parts != "w13":
            decode.w2(b.inner, b.ids, b.weights, b.out, b.bank(n))

    return run


def arms(b: Bench) -> Iterator[tuple[str, Layer]]:
    def floor(n: int) -> None:
        b.separator(n)
        b.nothing.launch((1,), 32)
        b.nothing.launch((1,), 32)

    yield "separator", b.separator
    yield "floor: two empty kernels", floor
    yield from rooflines(b)
    base = Decode(b.cuda, "first", b.banks[0])
    for parts in ("both", "w13", "w2"):
        yield f"ours {parts} plain", ours(b, base, False, parts)
    yield "ours both dependent", ours(b, base, True)
    for metadata in (3, 2):
        decode = Decode(b.cuda, "first", b.banks[0], metadata=metadata)
        yield f"metadata {metadata} plain", ours(b, decode, False)
        yield f"metadata {metadata} dependent", ours(b, decode, True)
    for source, found in json.loads((Path(__file__).parent / "variants.json").read_text()).items():
        for name in found:
            pair = (name, "") if source == "decode_w13" else ("", name)
            decode = Decode(b.cuda, "first", b.banks[0], variants=pair)
            yield f"{source} {name} plain", ours(b, decode, False)
            yield f"{source} {name} dependent", ours(b, decode, True)


def carved(b: Bench) -> Iterator[tuple[str, Layer]]:
    """All kernels asking for one split between L1 and shared memory, in percent."""
    base = Decode(b.cuda, "first", b.banks[0], carveout=14)
    yield "split: ours plain", ours(b, base, False)
    yield "split: ours dependent", ours(b, base, True)
    b.split(14)
    yield "split of all: separator", b.separator
    yield "split of all: ours plain", ours(b, base, False)
    yield "split of all: ours dependent", ours(b, base, True)
    for name, layer in rooflines(b):
        yield f"split of all: {name}", layer


def measure(cuda: Cuda) -> None:
    banks = [Bank(FIRST, 10 + n, every=True) for n in range(12)]
    table: dict[str, dict[str, float]] = {}
    for tokens in (1, 2, 4, 8):
        for routing in ("uniform", "same") if tokens > 1 else ("uniform",):
            bench, column = Bench(cuda, banks, tokens, routing), f"{tokens}{'' if routing == 'uniform' else ' same'}"
            print(f"M={column} D={bench.mean:.1f} {bench.mean * 0.768:.2f} MB", flush=True)
            for name, layer in (*arms(bench), *(carved(bench) if routing == "uniform" else ())):
                median, spread = bench.time(layer)
                table.setdefault(name, {})[column] = median
                print(f"   {name:40s} {median:7.2f} +-{spread:5.2f}", flush=True)
            note(f"M={tokens} outputs written", bool(torch.isfinite(bench.out).all()))
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    plain = {n: r for n, r in table.items() if n.startswith("roof") and n.endswith("plain")}
    roofs = {c: min(r[c] for r in plain.values() if c in r) for c in columns}
    print("\nus per layer (ratio to the fastest plain roofline)  M = " + ", ".join(columns))
    for name, row in table.items():
        cells = (f" {row[c]:6.2f} {row[c] / roofs[c]:4.2f}x" if c in row else " " * 13 for c in columns)
        print(f"{name:40s}" + "".join(cells))
