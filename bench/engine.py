"""A toy engine: paged attention, prompts in chunks, decode through CUDA graphs, experts of ours or dequantised ones.

    python bench/engine.py [device]

A decoder of a few layers with random weights. Both engines of a comparison have the same attention, router and
head, and differ in their experts only. Prints what was equal, the routes that ran, and seconds, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.facts import LayerFacts
from sm70_moe.numbers.codes import Codes
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import settings

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x (M, H), ids (M, k) INT32 and router weights (M, k) FP32 -> (M, H)."""

GATHERED = 64
"""Tokens up to which the dequantised experts gather weights, as a graph needs it; above, expert by expert."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of the decoder; `page` tokens are in a page of the cache."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    heads: int = 16
    vocabulary: int = 8192
    group: int = 128
    page: int = 64

    def source(self, index: int) -> SyntheticLayer:
        return SyntheticLayer(self.experts, self.hidden, self.intermediate, self.group, seed=index)


class Dequantised:
    """The experts of a host without us: FP16 weights, the library's products with FP32 accumulation.

    In `torch.float32` the same weights and no rounding in between: two right answers, whose distance says how much
    of any other distance the engine makes of roundings (a router near a tie chooses another expert).
    """

    def __init__(self, model: Model, index: int, device: str, dtype: torch.dtype = torch.float16) -> None:
        source = model.source(index)
        read = [source.read(expert, model.group) for expert in range(model.experts)]
        w13 = [torch.cat([weights(e.gate), weights(e.up)], 1) for e in read]
        self.w13 = torch.stack(w13).to(device, dtype)  # (E, H, 2I)
        self.w2 = torch.stack([weights(e.down) for e in read]).to(device, dtype)  # (E, I, H)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        run = self.gathered if len(x) <= GATHERED else self.by_expert
        return run(x.to(self.w13.dtype), ids, weights).to(x.dtype)

    def gathered(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        slots = ids.long()
        gate, up = (x[:, None, None] @ self.w13[slots]).chunk(2, -1)
        parts = (activation(gate, up) @ self.w2[slots]).squeeze(2)
        return (parts.float() * weights[:, :, None]).sum(1).to(x.dtype)

    def by_expert(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(len(self.w13)):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[rows] @ self.w13[expert]).chunk(2, -1)
            part = activation(gate, up) @ self.w2[expert]
            total.index_add_(0, rows, part.float() * weights[rows, slots, None])
        return total.to(x.dtype)


def activation(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def weights(codes: Codes) -> Tensor:
    """(K, N) FP16: code minus zero, times scale, groups of rows."""
    group = codes.codes.shape[0] // codes.scales.shape[0]
    zeros, scales = (part.repeat_interleave(group, 0) for part in (codes.zeros, codes.scales))
    return (codes.codes.to(torch.int16) - zeros.to(torch.int16)).to(torch.float16) * scales


class Counted:
    """A layer of ours that counts its routes: eager calls as they run, captured ones at capture."""

    def __init__(self, layer: MoELayer, routes: Counter[str]) -> None:
        self.layer = layer
        for name, run in layer.runs.items():
            layer.runs[name] = self.counting(name, run, routes)

    @staticmethod
    def counting(name: str, run: Callable[..., None], routes: Counter[str]) -> Callable[..., None]:
        def counted(*arguments: object) -> None:
            routes[name] += 1
            run(*arguments)

        return counted

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.layer(x, ids, weights)


class Engine:
    """The decoder with one kind of experts, and its pages. `sequences` at most, each of `length` tokens."""

    def __init__(self, model: Model, experts: Sequence[Experts], device: str, sequences: int, length: int) -> None:
        self.model, self.experts, self.device = model, experts, device
        made = torch.Generator().manual_seed(7)

        def drawn(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=made) / shape[-1] ** 0.5).to(device, torch.float16)

        hidden = model.hidden
        self.embedding = torch.randn(model.vocabulary, hidden, generator=made).to(device, torch.float16)
        self.head = drawn(model.vocabulary, hidden)
        self.qkv = [drawn(3 * hidden, hidden) for _ in experts]
        self.outer = [drawn(hidden, hidden) for _ in experts]
        self.routers = [drawn(model.experts, hidden) for _ in experts]
        pages = -(-length // model.page)
        # pages of a sequence lie apart, as in a server that has run for a while
        order = torch.randperm(sequences * pages, generator=made)
        self.table = order.view(sequences, pages).to(device)
        shape = (len(experts), 2, sequences * pages * model.page, model.heads, hidden // model.heads)
        self.cache = torch.zeros(shape, dtype=torch.float16, device=device)

    def slots(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """Where the cache holds these positions (...) of these sequences (...)."""
        page = self.model.page
        return self.table[sequences, positions // page] * page + positions % page

    def layer(self, index: int, x: Tensor, write: Tensor, read: Tensor, seen: Tensor) -> Tensor:
        """x (M, H) of S sequences with M/S tokens each. `read` (S, T) slots, `seen` (S, M/S, T)."""
        model, cache = self.model, self.cache[index]
        q, k, v = functional.linear(normed(x), self.qkv[index]).view(len(x), 3, model.heads, -1).unbind(1)
        cache[0].index_copy_(0, write, k)
        cache[1].index_copy_(0, write, v)
        keys, values = (part[read].transpose(1, 2) for part in cache)
        asked = q.view(len(read), -1, model.heads, q.shape[-1]).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=seen[:, None])
        x = x + functional.linear(mixed.transpose(1, 2).reshape(len(x), -1), self.outer[index])
        inner = normed(x)
        scores = functional.linear(inner, self.routers[index]).float().softmax(-1)
        router, ids = scores.topk(model.top_k)
        return x + self.experts[index](inner, ids.int(), router / router.sum(-1, keepdim=True))

    def step(self, tokens: Tensor, sequences: Tensor, positions: Tensor, most: int) -> Tensor:
        """tokens (S, n) at positions (S, n) -> logits (S, vocabulary) after each last; reads `most` positions."""
        every = torch.arange(most, device=self.device)
        write = self.slots(sequences[:, None], positions).flatten()
        read = self.slots(sequences[:, None], every[None])
        seen = every[None, None] <= positions[:, :, None]
        x = self.embedding[tokens.flatten()]
        for index in range(self.model.layers):
            x = self.layer(index, x, write, read, seen)
        last = normed(x).view(*tokens.shape, -1)[:, -1]
        return functional.linear(last, self.head).float()

    def prompt(self, tokens: Tensor, sequence: int, chunk: int) -> Tensor:
        """A prompt (T,) in chunks; logits (1, vocabulary) after it."""
        logits = None
        for first in range(0, len(tokens), chunk):
            part = tokens[None, first : first + chunk]
            positions = torch.arange(first, first + part.shape[1], device=self.device)[None]
            place = torch.tensor([sequence], device=self.device)
            logits = self.step(part, place, positions, first + part.shape[1])
        assert logits is not None
        return logits


class Decoder:
    """One token for each of S sequences, through a CUDA graph where there is a GPU."""

    def __init__(self, engine: Engine, sequences: Sequence[int], start: int, most: int) -> None:
        device = engine.device
        self.tokens = torch.zeros(len(sequences), 1, dtype=torch.long, device=device)
        self.positions = torch.full_like(self.tokens, start)
        places = torch.tensor(sequences, device=device)
        self.run: Callable[[], Tensor] = lambda: engine.step(self.tokens, places, self.positions, most)
        self.graph: torch.cuda.CUDAGraph | None = None
        if not device.startswith("cuda"):
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.run()

    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Token (S,) at `position` -> logits (S, vocabulary)."""
        self.tokens.copy_(tokens[:, None])
        self.positions.fill_(position)
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.logits.clone()


def normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


@dataclass(slots=True)
class Compared:
    """Steps of all sequences. A step whose tokens differ is a tie if the reference's logits of the two are as near
    as twice what the engines' logits are apart there, else a difference."""

    equal: int = 0
    ties: int = 0
    differences: list[tuple[int, float, float]] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)

    def see(self, step: int, theirs: Tensor, ours: Tensor) -> None:
        for reference, other in zip(theirs, ours, strict=True):
            apart = float((reference - other).abs().max())
            self.apart.append(apart)
            first, second = int(reference.argmax()), int(other.argmax())
            gap = float(reference[first] - reference[second])
            if first == second:
                self.equal += 1
            elif gap <= 2 * apart:
                self.ties += 1
            else:
                self.differences.append((step, gap, apart))

    def record(self) -> dict[str, object]:
        """`apart`: the most that a logit is apart at a step, as median, nine tenths and worst of all steps."""
        every = sorted(self.apart)
        some = [every[len(every) // 2], every[len(every) * 9 // 10], every[-1]]
        return {"equal": self.equal, "ties": self.ties, "differences": self.differences, "apart": some}


def facts_of(model: Model, index: int, device: str) -> LayerFacts:
    return LayerFacts(
        layer=f"model.layers.{index}.mlp.experts", index=index, hidden=model.hidden, intermediate=model.intermediate,
        experts=model.experts, top_k=model.top_k, format="awq", packing="gemm", bits=4, zero_point=True,
        checkpoint_group=model.group, activation="silu", gated=True, bias=False, router_weight_on_input=False,
        activations="float16", tensor_parallel=1, tensor_rank=0, expert_parallel=1, expert_rank=0, device=device,
    )  # fmt: skip


def compare(model: Model, device: str, sequences: int, prompt: int, chunk: int, steps: int) -> dict[str, Any]:
    """Prompts of `sequences` users, then decode of one, of eight, of all, by three engines that see the same tokens.

    `theirs` is the reference; `ours` and `exact` (dequantised in FP32) are held against it.
    """
    routes: Counter[str] = Counter()
    length = prompt + 3 * steps
    sizes = sorted({1, min(8, sequences), sequences})
    with torch.inference_mode(), AdmissionService(settings()) as service:
        layers = [service.layer(facts_of(model, i, device), model.source(i)) for i in range(model.layers)]
        service.warm_up([chunk, *sizes])
        portable = {r.name for layer in layers for r in layer.plan.routes if r.backend == "legacy"}
        experts: dict[str, list[Experts]] = {
            "theirs": [Dequantised(model, i, device) for i in range(model.layers)],
            "ours": [Counted(layer, routes) for layer in layers],
            "exact": [Dequantised(model, i, device, torch.float32) for i in range(model.layers)],
        }
        engines = {name: Engine(model, every, device, sequences, length) for name, every in experts.items()}
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, model.vocabulary, (sequences, prompt), generator=draw).to(device)
        found, seconds = {"ours": Compared(), "exact": Compared()}, dict.fromkeys(engines, 0.0)

        def all_of(step: int, call: Callable[[str], Tensor]) -> Tensor:
            """One step of each engine; the reference's next tokens (S,)."""
            logits = {}
            for name in engines:
                start = time.perf_counter()
                logits[name] = call(name)
                if device != "cpu":
                    torch.cuda.synchronize()
                seconds[name] += time.perf_counter() - start
            for name, compared in found.items():
                compared.see(step, logits["theirs"], logits[name])
            return logits["theirs"].argmax(-1)

        after = [
            all_of(0, lambda name, s=sequence: engines[name].prompt(tokens[s], s, chunk))
            for sequence in range(sequences)
        ]
        prompts, current, position = dict(seconds), torch.cat(after), prompt
        for size in sizes:
            decoders = {name: Decoder(engine, range(size), position, length) for name, engine in engines.items()}
            for step in range(steps):
                chosen = all_of(step, lambda name, d=decoders, c=current[:size], at=position: d[name](c, at))
                current, position = torch.cat([chosen, current[size:]]), position + 1
    return {
        **{name: compared.record() for name, compared in found.items()},
        "routes": dict(routes),
        "portable": sum(routes[name] for name in portable),
        "prompts_s": prompts,
        "decode_s": {name: seconds[name] - prompts[name] for name in seconds},
    }


MODEL = Model(hidden=1024, intermediate=512, experts=32, top_k=4, layers=4)


def main(device: str = "cuda:0") -> None:
    """Twelve sequences: prompts of 4,096 tokens in chunks of 2,048, then 32 steps of one, of eight and of twelve."""
    print(json.dumps(compare(MODEL, device, sequences=12, prompt=4096, chunk=2048, steps=32), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
