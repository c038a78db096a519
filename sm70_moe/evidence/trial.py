"""Runs a route as a black box and judges what comes out.

The route is called as an engine calls it, on outputs that are filled with NaN. The results of single
slots are read off by *probing*: with every other id set to -1 and a router weight of 1, the output
is the slot's own W2 result, exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sm70_moe.decision import Plain
from sm70_moe.kernels.call import Call
from sm70_moe.reference.arithmetic import Reference
from sm70_moe.reference.bounds import judge, judge_w13
from sm70_moe.reference.rounding import widen

Runs = Callable[[Call], None]
"""A backend's `run` with the banks bound to it."""

JUDGED_ROWS = 16
"""Rows that are judged of a longer call: the FP64 reference decodes each of their experts."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one call is given: x (M, H), ids (M, k) INT32, weights (M, k) FP32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(
        cls,
        tokens: int,
        top_k: int,
        *,
        hidden: int,
        experts: int,
        dtype: str = "float16",
        seed: int = 0,
        device: str = "cpu",
    ) -> Inputs:
        """What a normalised layer and its router send: x of unit variance, different experts in a
        row (as far as there are k of them), softmax weights that sum to 1."""
        source = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, hidden, generator=source).to(DTYPES[dtype])
        scores = torch.randn(tokens, max(experts, top_k), generator=source)
        best, ids = scores.topk(top_k)
        return cls(x.to(device), (ids % experts).int().to(device), torch.softmax(best, 1).to(device))

    def probe(self, rows: torch.Tensor, slot: int) -> Inputs:
        """The same call with only this slot of these rows alive, with weight 1."""
        ids = torch.full_like(self.ids, -1)
        ids[rows, slot] = self.ids[rows, slot]
        return Inputs(self.x, ids, torch.ones_like(self.weights))

    @property
    def tokens(self) -> int:
        return self.x.shape[0]


@dataclass(frozen=True, slots=True)
class Result:
    """One row of a report: a route at one number of tokens.

    `seconds` is the faster of two calls. `w13` and `w2` are bound fractions, `out` that of the sum over
    the slots, `out_exact` says whether the sum has exactly the bits that the slots give. `rows`
    counts the rows that were judged. `finite` holds for all rows, `repeatable` says that two
    calls, with and without an export of the intermediate, gave the same bits. `beyond` are the experts
    whose W2 sum the contract makes infinite before the router's weight, `largest` the largest such sum:
    what is infinite for that reason is as it must be, and counts as finite.
    """

    route: str
    backend: str
    tokens: int
    rows: int
    seconds: float
    w13: float
    w2: float
    out: float
    out_exact: bool
    finite: bool
    repeatable: bool
    beyond: tuple[int, ...] = ()
    largest: float = 0.0

    @property
    def ok(self) -> bool:
        """Bounds kept, everything finite but what must not be, bits repeated."""
        bounds = all(value <= 1.0 for value in (self.w13, self.w2, self.out))
        return bounds and self.finite and self.repeatable

    def record(self) -> dict[str, Plain]:
        """Plain JSON types; a fraction that is infinite is None, which JSON can write."""
        plain: dict[str, Plain] = {
            k: None if isinstance(v, float) and not isfinite(v) else v for k, v in asdict(self).items()
        }
        return {**plain, "beyond": list(self.beyond), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Trial:
    """A route under test, and the reference of the weights that it should have.

    `intermediate` is I of this rank. `factor` is 2 where the hardware does not round to nearest.
    At most `rows` rows of a call are judged, the first and the last among them.
    """

    route: str
    backend: str
    run: Runs
    reference: Reference
    intermediate: int
    factor: float = 1.0
    rows: int = JUDGED_ROWS

    def judge(self, call: Inputs) -> Result:
        """Run the call twice, probe its slots, and judge a sample of its rows.

        Runs the route 2 + k times. Holds (M, H) and (M, k, I) a few times, and for the judged rows
        (rows, k, H) in FP64; one expert is decoded at a time.
        """
        plain, _, first = self.once(call, export=False)
        out, whole, second = self.once(call, export=True)
        rows = sample(call.tokens, self.rows).to(call.x.device)
        slots, inner, quiet = self.probes(call, rows)
        x, ids, weights, given = (numbers(t) for t in (call.x[rows], call.ids[rows], call.weights[rows], inner))
        answer = self.reference.answer(x, ids.astype(np.int64), weights, dtype_name(call.x), given)
        verdict = judge(answer, given, numbers(slots), numbers(out[rows]), weights, self.factor)
        beyond = np.isinf(answer.products) & np.isfinite(answer.slots)  # (rows, k, H)
        must = np.zeros(tuple(out.shape), bool)
        must[rows.cpu().numpy()] = beyond.any(1)
        return Result(
            route=self.route,
            backend=self.backend,
            tokens=call.tokens,
            rows=len(rows),
            seconds=min(first, second),
            # a probe's activations are the call's own, unless the route rounds differently in company
            w13=max(verdict.w13, judge_w13(answer, widen(numbers(whole[rows])), self.factor)),
            w2=verdict.w2,
            out=verdict.out if quiet else inf,
            out_exact=verdict.out_exact and quiet,
            finite=bool(
                (np.isfinite(numbers(slots)) | beyond).all()
                and (np.isfinite(numbers(out)) | must).all()
                and torch.isfinite(whole).all()
            ),
            repeatable=same_bits(plain, out),
            beyond=tuple(sorted({int(one) for one in ids[beyond.any(2)]})),
            largest=float(np.abs(answer.slots[beyond]).max(initial=0.0)),
        )

    def once(self, call: Inputs, export: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One call on poisoned buffers: out, intermediate (poison where not exported), seconds."""
        out = torch.full_like(call.x, torch.nan)
        inner = call.x.new_full((*call.ids.shape, self.intermediate) if export else (0,), torch.nan)
        wait(call.x.device)
        start = time.perf_counter()
        self.run(Call(call.x, call.ids, call.weights, out, inner if export else None))
        wait(call.x.device)
        return out, inner, time.perf_counter() - start

    def probes(self, call: Inputs, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """W2 results (rows, k, H) and activations (rows, k, I) of these rows, one slot at a time.

        The flag is False if a row without a valid id did not come out as exactly zero.
        """
        top_k, quiet = call.ids.shape[1], True
        slots = call.x.new_empty(len(rows), top_k, call.x.shape[1])
        inner = call.x.new_empty(len(rows), top_k, self.intermediate)
        silent = torch.ones(call.tokens, dtype=torch.bool, device=call.x.device)
        silent[rows] = False
        for slot in range(top_k):
            out, activations, _ = self.once(call.probe(rows, slot), export=True)
            slots[:, slot], inner[:, slot] = out[rows], activations[rows, slot]
            quiet = quiet and bool((out[silent] == 0).all())
        return slots, inner, quiet


def sample(tokens: int, count: int) -> torch.Tensor:
    """At most `count` row numbers, evenly spread from the first to the last."""
    return torch.linspace(0, tokens - 1, min(tokens, count)).round().long()


def numbers(tensor: torch.Tensor) -> NDArray[Any]:
    """Values as numpy has them; FP32 holds FP16 and BF16 exactly."""
    found: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    return found


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and -0 is not 0."""
    bits = BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


def wait(device: torch.device) -> None:
    """Let the device finish, so that the clock sees all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
