"""A request from its prompt to its last token: the experts of every layer, as the plan runs them.

What else a model does (attention, norms, the router, sampling) is not in it. All layers are alike: one
plan, and as many banks as fit, read in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sm70_moe.benchmark.timing import Stopwatch, Work
from sm70_moe.decision import Plain
from sm70_moe.errors import SettingsError
from sm70_moe.facts import CallFacts, TensorFacts
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.warming import warm_up

PROMPT, DECODE = "prompt", "decode"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of `prompt` tokens in chunks of up to `chunk`, then `decoded` tokens one by one, through `layers`."""

    prompt: int
    decoded: int
    layers: int
    chunk: int

    def __post_init__(self) -> None:
        for name, value, least in (
            ("prompt", self.prompt, 1),
            ("decoded", self.decoded, 0),
            ("layers", self.layers, 1),
        ):
            if value < least:
                raise SettingsError(f"request: {name} {value}, expected {least} or more")
        if self.chunk < 1:
            raise SettingsError(f"request: chunk {self.chunk}, expected 1 or more")

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of each of the prompt's calls."""
        whole, rest = divmod(self.prompt, self.chunk)
        return (self.chunk,) * whole + ((rest,) if rest else ())

    @property
    def counts(self) -> tuple[int, ...]:
        """Every number of tokens that is sent."""
        return tuple(dict.fromkeys((*self.chunks, *((1,) if self.decoded else ()))))

    def record(self) -> dict[str, Plain]:
        return {"prompt": self.prompt, "decoded": self.decoded, "layers": self.layers, "chunk": self.chunk}


@dataclass(frozen=True, slots=True)
class Part:
    """The steps of one phase with equally many tokens: one route, `steps` times all layers, `microseconds` in all."""

    phase: str
    tokens: int
    route: str
    steps: int
    layers: int
    microseconds: float

    @property
    def each(self) -> float:
        """Microseconds of one layer call."""
        return self.microseconds / self.steps / self.layers

    def record(self) -> dict[str, Plain]:
        own: dict[str, Plain] = {"phase": self.phase, "tokens": self.tokens, "route": self.route}
        return own | {"calls": self.steps * self.layers, "microseconds": self.microseconds, "layer": self.each}


class HostStopwatch:
    """A device that computes while it is called: what `Stopwatch` asks, of a CPU."""

    def capture(self, work: Work) -> Work:
        return work

    def elapsed(self, work: Work) -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6

    def wait(self) -> None:
        """It has finished."""


@dataclass(slots=True)
class Stage:
    """Layers on one device with what is sent to them; every step has ids of its own, drawn before it is timed."""

    layers: Sequence[MoELayer]
    count: int
    watch: Stopwatch
    source: torch.Generator

    @classmethod
    def of(cls, layers: Sequence[MoELayer], count: int, watch: Stopwatch, seed: int) -> Stage:
        return cls(layers, count, watch, torch.Generator(layers[0].banks.device).manual_seed(seed))

    def tensors(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (M, H), ids (layers, M, k) without an expert yet, weights (M, k)."""
        layer = self.layers[0]
        facts, device = layer.plan.admission.facts, layer.banks.device
        top_k, dtype = facts.top_k or 1, getattr(torch, facts.activations or "float16")
        x = torch.randn(tokens, layer.banks.shape.hidden, generator=self.source, device=device).to(dtype)
        ids = torch.zeros(self.count, tokens, top_k, dtype=torch.int32, device=device)
        weights = torch.rand(tokens, top_k, generator=self.source, device=device).softmax(1)
        return x, ids, weights

    def draw(self, ids: torch.Tensor) -> None:
        """Different experts in a token, uniformly, in place: a graph that was captured reads them."""
        experts, first = self.layers[0].banks.shape.experts, self.layers[0].first
        for layer in ids:
            scores = torch.rand(len(layer), max(experts, ids.shape[2]), generator=self.source, device=ids.device)
            layer.copy_(scores.topk(ids.shape[2], dim=1).indices % experts + first)

    def steps(self, phase: str, tokens: int, steps: int) -> Part:
        """Time `steps` calls of every layer; those of the decode phase in a graph, as engines run them."""
        x, ids, weights = self.tensors(tokens)
        out = torch.empty_like(x)

        def work() -> None:
            for n in range(self.count):
                self.layers[n % len(self.layers)](x, ids[n], weights, out)

        self.draw(ids)
        again = self.watch.capture(work) if phase == DECODE else work
        again()
        microseconds = 0.0
        for _ in range(steps):
            self.draw(ids)
            self.watch.wait()
            microseconds += self.watch.elapsed(again)
        route = self.layers[0].plan.route(CallFacts(*(TensorFacts.of(t) for t in (x, ids[0], weights, out))))
        assert route is not None  # there are tokens, and a layer without routes is not made
        return Part(phase, tokens, route.name, steps, self.count, microseconds)


def run(
    request: Request, layers: Sequence[MoELayer], watch: Stopwatch, seed: int, tell: Callable[[str], None]
) -> tuple[Part, ...]:
    """The parts of a request, in its order. Every kind of call has run before it is timed."""
    tell("warm-up")
    warm_up(layers, request.counts)
    stage = Stage.of(layers, request.layers, watch, seed)
    return tuple(parts(request, stage, tell))


def parts(request: Request, stage: Stage, tell: Callable[[str], None]) -> Iterator[Part]:
    for tokens in dict.fromkeys(request.chunks):
        tell(f"prompt, {tokens} tokens a call")
        yield stage.steps(PROMPT, tokens, request.chunks.count(tokens))
    if request.decoded:
        tell("decode")
        yield stage.steps(DECODE, 1, request.decoded)
