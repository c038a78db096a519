"""Proof at load: a native route runs on the layer's own banks before it is kept.

A few of the layer's own experts, made-up inputs, a few columns of each result; every version of the
kernels that the plan can reach. What must come out is computed in FP64 from the codes of the weights'
source, which never went through banks or kernels, and judged by the bounds of CONTRACT 9. So swapped
halves, other groups or zeros, another layer's bank and code that does not fit its layout are all seen
before the first request.

The first layer of a kind is tried with every version. One that is alike (equal plans, one device) launches
the same kernels, and only its banks are new: it is tried with one of the calls, the next layer with the next.
If that is wrong, all of them are tried on it too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import inf

import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.decision import Finding, Plain, Reason
from sm70_moe.kernels.protocol import Backend, Workspace
from sm70_moe.numbers.codes import WeightSource
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.planned import PlannedRoute
from sm70_moe.runtime.subject import MOST_TOKENS, Made, Subject, Versions

CHECK = "proof"


@dataclass(frozen=True, slots=True)
class Proof:
    """What one native route did on a layer's banks: largest bound fractions, or what it raised.

    `tokens` are the lengths of its calls; without any it was tried on a layer before that is alike.
    """

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
        if self.ok and not self.tokens:
            return Finding.passed(CHECK, "on a layer that is alike")
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
    """Makes inputs once for each kind of layer; proves layer by layer.

    `whole` counts the layers that were tried with every version, `layers` all; `seconds` adds up over them.
    """

    seconds: float = 0.0
    layers: int = 0
    whole: int = 0
    _inputs: dict[tuple[object, ...], Made] = field(default_factory=dict)
    _versions: Versions = field(default_factory=Versions)
    _alike: dict[tuple[object, ...], int] = field(default_factory=dict)
    _told: int = 0

    def prove(
        self, plan: Plan, banks: Banks, weights: WeightSource, backends: dict[str, Backend], space: Workspace | None
    ) -> tuple[Proof, ...]:
        """A proof for each native route of a plan; none for a plan without one. A route that was not tried on this
        layer, since it is like one before, has a proof without tokens."""
        natives = [(route, backends[route.backend]) for route in plan.routes if backends[route.backend].native]
        if not natives or not banks.shape.experts:
            return ()
        start = time.perf_counter()
        subject = Subject.of(plan, banks, weights, self._made(plan, banks), self._versions)
        kind = (plan.digest, banks.shape, banks.layout, banks.device, *(id(backend) for _, backend in natives))
        turn = self._alike.get(kind)
        proofs = self._proofs(subject, natives, space, turn)
        if turn is not None and not all(proof.ok for proof in proofs):
            turn, proofs = None, self._proofs(subject, natives, space, None)
        if all(proof.ok for proof in proofs):
            self._alike[kind] = 0 if turn is None else turn + 1
        self.seconds, self.layers = self.seconds + time.perf_counter() - start, self.layers + 1
        self.whole += turn is None
        return proofs

    @staticmethod
    def _proofs(
        subject: Subject, natives: list[tuple[PlannedRoute, Backend]], space: Workspace | None, turn: int | None
    ) -> tuple[Proof, ...]:
        found = subject.prove(natives, space, turn)
        return tuple(
            Proof(route.name, one.tokens, subject.experts, one.w13, one.out, one.error)
            for (route, _), one in zip(natives, found, strict=True)
        )

    def news(self) -> dict[str, Plain] | None:
        """What was tried so far, for the record; None if that was said before, or nothing was tried."""
        if self.layers == self._told:
            return None
        self._told = self.layers
        some = self.layers - self.whole
        text = f"{self.layers} layers were tried on their own banks: {self.whole} with every version of the kernels"
        text += f", {some} that are alike with one version each, in turn" if some else ""
        return {
            "layers": self.layers,
            "whole": self.whole,
            "milliseconds": round(1e3 * self.seconds / self.layers, 2),
            "text": f"{text}; {1e3 * self.seconds / self.layers:.1f} ms a layer",
        }

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
