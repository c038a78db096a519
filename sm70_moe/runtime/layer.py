"""MoELayer: banks plus plan. The only code of this package on an engine's hot path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.errors import BackendError
from sm70_moe.facts import CallFacts, TensorFacts
from sm70_moe.kernels.arguments import check_gradients, check_overlap
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.protocol import Backend, Readied, Workspace
from sm70_moe.living import LivingValue
from sm70_moe.numbers.dense import require_dense
from sm70_moe.plan.plan import Plan
from sm70_moe.reading.shard import split

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


Captured = Callable[[Plan, int, str | None], None]
"""Told of a call that a CUDA graph captures: its plan, tokens and route, which the graph keeps."""

MOST_ALIGNMENT = 256
"""Bytes; no condition of a policy asks for more."""

MOST_KINDS = 4096
"""Kinds of calls that a layer remembers before it forgets them all: as many as shapes that an engine sends."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What all calls of one kind have in common: their route (None without tokens), and whether ids or
    router weights are converted."""

    route: str | None
    converts: bool


class MoELayer(LivingValue):
    """The experts of one layer on one rank.

    Ids are those of the whole layer: `first` is that of this rank's first expert, and experts of
    other ranks contribute exactly zero here. `runs` maps each admitted route to what runs it. Ids
    may be INT32 or INT64, router weights FP16, BF16 or FP32: they are converted before the route is
    chosen. No tensor value is read to choose it. `space` lends working memory.
    """

    def __init__(
        self,
        plan: Plan,
        banks: Banks,
        backends: Mapping[str, Backend],
        captured: Captured | None = None,
        space: Workspace | None = None,
    ) -> None:
        facts = plan.admission.facts
        self.plan, self.banks, self.captured, self.space = plan, banks, captured, space
        self.first = split(facts.experts or 0, facts.expert_parallel or 1, facts.expert_rank or 0).start
        self.runs: dict[str, Callable[..., None]] = {r.name: backends[r.backend].run for r in plan.routes}
        self._kinds: dict[tuple[object, ...], Kind] = {}
        for name in dict.fromkeys(route.backend for route in plan.routes):
            backend = backends[name]
            if isinstance(backend, Readied):
                backend.ready(banks, facts.top_k or 0)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (M, H), ids (M, k) and router weights (M, k) -> out (M, H) in x's dtype.

        An id outside of the experts makes its slot contribute exactly zero. Inference only: raises
        BackendError where gradients are recorded and a tensor asks for them, for shapes, dtypes or
        devices that do not fit, and for an `out` that overlaps an input.
        """
        if torch.is_grad_enabled():
            check_gradients({"x": x, "weights": weights, "out": out})
        given = out
        try:
            if out is None:
                out = torch.empty_like(x, memory_format=torch.contiguous_format)
            address = x.data_ptr() | out.data_ptr() | MOST_ALIGNMENT
            # everything that a plan may look at; what it says of such a call does not change
            seen = (
                *(x.shape, x.stride(), x.dtype, x.device, address & -address),
                *(out.shape, out.stride(), out.dtype),
                *(ids.shape, ids.stride(), ids.dtype),
                *(weights.shape, weights.stride(), weights.dtype),
            )
        except RuntimeError:  # sparse and nested tensors have no strides
            require_dense({"x": x, "ids": ids, "weights": weights, "out": given})
            raise
        kind = self._kinds.get(seen)
        if kind is None:
            kind = self._kind(seen, x, ids, weights, out)
        if kind.converts:
            if given is not None:  # the backend sees copies, which overlap nothing
                check_overlap({"ids": ids, "weights": weights}, {"out": out})
            ids, weights = local_ids(narrow_ids(ids), self.first), weights.to(torch.float32)
        if self.captured is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured(self.plan, x.shape[0], kind.route)
        if kind.route is not None:
            self.runs[kind.route](self.banks, Call(x, ids, weights, out), self.space)
        return out

    def _kind(
        self, seen: tuple[object, ...], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Kind:
        """Check a call of a kind that was not seen before, and ask the plan for its route."""
        self._check(x, ids, weights, out)
        converts = bool(self.first) or ids.dtype != torch.int32 or weights.dtype != torch.float32
        inner = (local_ids(narrow_ids(ids), self.first), weights.to(torch.float32)) if converts else (ids, weights)
        route = self.plan.route(CallFacts(*(TensorFacts.of(tensor) for tensor in (x, *inner, out))))
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        self._kinds[seen] = kind = Kind(route.name if route else None, converts)
        return kind

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        hidden = self.banks.shape.hidden
        require_dense({"x": x, "ids": ids, "weights": weights, "out": out})
        if x.device != self.banks.device:
            raise BackendError(f"x is on {x.device}; accepted: {self.banks.device}, where the banks are")
        if x.dim() != 2 or x.shape[1] != hidden:
            raise BackendError(f"x has shape {tuple(x.shape)}; accepted: (tokens, {hidden})")
        slots = (x.shape[0], self.plan.admission.facts.top_k)
        for name, tensor, dtypes in (("ids", ids, INTEGERS), ("weights", weights, FLOATS), ("x", x, FLOATS)):
            if tensor is not x and tuple(tensor.shape) != slots:
                raise BackendError(f"{name} has shape {tuple(tensor.shape)}; accepted: {slots}")
            if tensor.dtype not in dtypes:
                raise BackendError(f"{name} has dtype {tensor.dtype}; accepted: {', '.join(map(str, dtypes))}")
        check_overlap({"x": x, "ids": ids, "weights": weights}, {"out": out})
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            raise BackendError(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}; "
                f"accepted: {tuple(x.shape)} {x.dtype} on {x.device}, as x"
            )


def narrow_ids(ids: torch.Tensor) -> torch.Tensor:
    """INT64 ids as INT32; one that does not fit becomes -1, which is invalid like itself."""
    if ids.dtype == torch.int32:
        return ids
    fits = (ids >= 0) & (ids < 2**31)
    return torch.where(fits, ids, -1).to(torch.int32)


def local_ids(ids: torch.Tensor, first: int) -> torch.Tensor:
    """INT32 ids of the whole layer as numbers of a rank's own experts, which start at expert `first`.

    One subtraction: an expert of another rank comes out below 0 or at least as high as this rank
    has experts, and is invalid like that (CONTRACT 5); so does every id that was invalid before,
    the lowest INT32 numbers too, which wrap round to the highest.
    """
    return ids - first if first else ids
