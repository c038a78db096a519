"""Proof at load: a native route runs on the layer's own banks before it is kept.

A few of the layer's own experts, made-up inputs, a few columns of each result; every version of the
kernels that the plan can reach. What must come out is computed in FP64 from the codes of the weights'
source, which never went through banks or kernels, and judged by the bounds of CONTRACT 9. So swapped
halves, other groups or zeros, another layer's bank and code that does not fit its layout are all seen
before the first request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.decision import Finding, Plain, Reason
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.refusal import Crash
from sm70_moe.kernels.protocol import Backend, Versioned, Workspace
from sm70_moe.numbers.codes import Codes, WeightSource
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.planned import PlannedRoute
from sm70_moe.reading.offers import read_columns
from sm70_moe.reference.arithmetic import CodedMatrix
from sm70_moe.reference.bounds import judge_out, judge_w13
from sm70_moe.reference.columns import Array, Called, Columns
from sm70_moe.reference.rounding import Floats

CHECK = "proof"
MATRICES = ("gate", "up", "down")

COLUMNS = 8
"""Columns of gate, up and down that are judged: one word of them."""

MOST_TOKENS = 8
"""A proof's calls are no longer than that; a route that begins later is tried at its first count."""

FACTOR = 2.0
"""Tensor cores need not round to nearest (CONTRACT 9)."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What one native route did on a layer's banks: largest bound fractions, or what it raised."""

    route: str
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    w13: float
    out: float
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.w13 <= 1.0 and self.out <= 1.0

    @property
    def finding(self) -> Finding:
        """Passed, or wrong with numbers."""
        if self.ok:
            return Finding.passed(CHECK, f"W13 {self.w13:.3f}, output {self.out:.3f} of the bound")
        hint = f"on experts {', '.join(map(str, self.experts))} of the layer's own banks"
        found = self.error or f"W13 {self.w13:.3g}, output {self.out:.3g}"
        return Finding.failed(CHECK, Reason.PROOF_FAILED, "at most 1 of the bound", found, hint)

    def record(self) -> dict[str, Plain]:
        """Plain JSON types; a fraction that is infinite is a text."""
        w13, out = (value if value < inf else "inf" for value in (self.w13, self.out))
        return {
            "route": self.route,
            "tokens": list(self.tokens),
            "experts": list(self.experts),
            "w13": w13,
            "out": out,
            "error": self.error,
        }


@dataclass(slots=True)
class Prover:
    """Makes inputs once for each kind of layer; proves layer by layer. `seconds` adds up over all of them."""

    seconds: float = 0.0
    layers: int = 0
    _inputs: dict[tuple[object, ...], Made] = field(default_factory=dict)

    def prove(
        self, plan: Plan, banks: Banks, weights: WeightSource, backends: dict[str, Backend], space: Workspace | None
    ) -> tuple[Proof, ...]:
        """A proof for each native route of a plan; none for a plan without one."""
        natives = [route for route in plan.routes if backends[route.backend].native]
        if not natives or not banks.shape.experts:
            return ()
        start = time.perf_counter()
        subject = Subject.of(plan, banks, weights, self._made(plan, banks))
        proofs = tuple(subject.prove(route, backends[route.backend], space) for route in natives)
        self.seconds, self.layers = self.seconds + time.perf_counter() - start, self.layers + 1
        return proofs

    def _made(self, plan: Plan, banks: Banks) -> Made:
        """x (M, H) and router weights (M, k) of the longest call."""
        top_k, dtype = plan.admission.facts.top_k or 1, plan.admission.facts.activations or "float16"
        tokens = max(MOST_TOKENS, *(route.tokens.first for route in plan.routes))
        key = (tokens, banks.shape.hidden, top_k, dtype, banks.device)
        if key not in self._inputs:
            random = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, banks.shape.hidden, generator=random).to(getattr(torch, dtype))
            weights = torch.rand(tokens, top_k, generator=random) + 0.5
            on_device = x.to(banks.device), weights.to(banks.device)
            self._inputs[key] = Made(*on_device, x.float().numpy(), weights.numpy(), dtype)
        return self._inputs[key]


@dataclass(frozen=True, slots=True)
class Made:
    """Inputs of the longest call, on the device and as numbers."""

    x: torch.Tensor
    weights: torch.Tensor
    rows: Array
    factors: Array
    dtype: str


@dataclass(frozen=True, slots=True)
class Subject:
    """One layer, the call that it is tried with, and what must come out of some columns."""

    plan: Plan
    banks: Banks
    made: Made
    experts: tuple[int, ...]
    chosen: Array
    ids: torch.Tensor
    inner: range
    outer: range
    expected: Called
    judged: dict[object, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, banks: Banks, weights: WeightSource, made: Made) -> Subject:
        index, shape, group = plan.admission.facts.index or 0, banks.shape, banks.layout.group
        experts = chosen(shape.experts, index)
        inner, outer = word(shape.intermediate, index), word(shape.hidden, index + 1)
        read = {expert: read_columns(weights, expert, group, inner, outer) for expert in experts}
        columns = Columns(
            *({expert: decoded(getattr(found, name), group) for expert, found in read.items()} for name in MATRICES)
        )
        ids = slots(experts, *made.factors.shape)
        on_device = torch.from_numpy(ids).to(banks.device)
        return cls(plan, banks, made, experts, ids, on_device, inner, outer, columns.of(made.rows, made.dtype))

    def prove(self, route: PlannedRoute, backend: Backend, space: Workspace | None) -> Proof:
        """Run every version that the route can reach, and judge it. What a kernel raises is the proof's error."""
        counts: tuple[int, ...] = (route.tokens.first,)  # until the backend has said more
        try:
            counts = versions(route, backend, self.banks, self.ids.shape[1])
            worst = [self._tried(tokens, backend, space) for tokens in counts]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code: a driver, a plug-in
            return Proof(route.name, counts, self.experts, inf, inf, str(Crash.of(error)))
        w13, out = np.max(worst, axis=0)  # NaN among them stays NaN, and is not ok
        return Proof(route.name, counts, self.experts, float(w13), float(out))

    def _tried(self, tokens: int, backend: Backend, space: Workspace | None) -> tuple[float, float]:
        """Bound fractions of one call; routes that launch the same kernels for it are tried once."""
        kernels = backend.version(self.banks, self.ids.shape[1], tokens) if isinstance(backend, Versioned) else None
        key = (tokens, kernels or backend.name)
        if key not in self.judged:
            self.judged[key] = self._judge(*self._run(tokens, backend, space))
        return self.judged[key]

    def _run(self, tokens: int, backend: Backend, space: Workspace | None) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """One call on outputs of NaN: activations (M, k, I), some columns of the output; is NaN nowhere?"""
        x = self.made.x[:tokens]
        inner = x.new_full((tokens, self.ids.shape[1], self.banks.shape.intermediate), torch.nan)
        out = torch.full_like(x, torch.nan)
        backend.run(self.banks, Call(x, self.ids[:tokens], self.made.weights[:tokens], out, inner), space)
        # NaN in the activations would make the expected output NaN too: it is looked for in all of both
        lost = torch.isnan(inner).any() | torch.isnan(out).any()
        return inner.float().cpu(), out[:, self.outer.start : self.outer.stop].float().cpu(), not lost

    def _judge(self, inner: torch.Tensor, out: torch.Tensor, whole: bool) -> tuple[float, float]:
        """Bound fractions of the activations' columns and of the output's, W2 on the route's own activations."""
        if not whole:
            return inf, inf
        tokens, given = len(out), inner.numpy()
        factors = self.made.factors[:tokens]
        with np.errstate(all="ignore"):
            answer = self.expected.answer(self.chosen[:tokens], factors, given)
            columns = given[:, :, self.inner.start : self.inner.stop].astype(np.float64)
            return judge_w13(answer, columns, FACTOR), judge_out(
                answer, out.numpy().astype(np.float64), factors, FACTOR
            )


def chosen(experts: int, index: int) -> tuple[int, ...]:
    """Two experts, others in each layer: what a proof costs is mostly their decoding in FP64."""
    return tuple(dict.fromkeys((index % experts, (37 * index + experts // 2) % experts)))


def word(size: int, index: int) -> range:
    """One word of columns, another one in each layer."""
    start = (5 * index) % max(1, size // COLUMNS) * COLUMNS
    return range(start, start + COLUMNS)


def slots(experts: tuple[int, ...], tokens: int, top_k: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Ids (M, k): the experts in turn, a few twice in a row, and one slot without any where there are several."""
    ids = np.fromiter((experts[n % len(experts)] for n in range(tokens * top_k)), np.int32).reshape(tokens, top_k)
    if top_k > 1:
        ids[0, -1] = -1
    return ids


def decoded(codes: Codes, group: int) -> Floats:
    """Weights of a source's codes, in FP64."""
    arrays = (codes.codes.cpu().numpy(), codes.zeros.cpu().numpy(), codes.scales.cpu().numpy())
    every = slice(None)
    return CodedMatrix(*arrays, np.arange(len(codes.codes)) // group).weights(every, every)


def versions(route: PlannedRoute, backend: Backend, banks: Banks, top_k: int) -> tuple[int, ...]:
    """Token counts at which a route launches other kernels than at fewer tokens, each once."""
    first, last = route.tokens.first, route.tokens.last
    within = range(first, max(first, min(last or MOST_TOKENS, MOST_TOKENS)) + 1)
    if isinstance(backend, Versioned):
        return tuple(_changes(backend, banks, top_k, within))
    return tuple(dict.fromkeys((within[0], within[-1])))


def _changes(backend: Versioned, banks: Banks, top_k: int, counts: range) -> Iterator[int]:
    """The fewest tokens, and the most for each set of kernels."""
    yield counts[0]
    names = [backend.version(banks, top_k, tokens) for tokens in counts]
    most = dict(zip(names, counts, strict=True))
    yield from (tokens for tokens in sorted(most.values()) if tokens != counts[0])
