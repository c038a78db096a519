"""MoELayer: banks plus plan. The only code of this package on an engine's hot path."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sm70_moe.errors import BackendError
from sm70_moe.facts import CallFacts, TensorFacts
from sm70_moe.kernels import Backend
from sm70_moe.kernels.arguments import check_overlap
from sm70_moe.plan import Plan
from sm70_moe.weights.banks import Banks
from sm70_moe.weights.shard import split

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


class MoELayer:
    """The experts of one layer on one rank.

    Ids are those of the whole layer: `first` is that of this rank's first expert, and experts of
    other ranks contribute exactly zero here. `runs` maps each admitted route to what runs it. Ids
    may be INT32 or INT64, router weights FP16, BF16 or FP32: they are converted before the route is
    chosen. No tensor value is read to choose it.
    """

    def __init__(self, plan: Plan, banks: Banks, backends: Mapping[str, Backend]) -> None:
        facts = plan.admission.facts
        self.plan, self.banks = plan, banks
        self.first = split(facts.experts or 0, facts.expert_parallel or 1, facts.expert_rank or 0).start
        self.runs: dict[str, Callable[..., None]] = {r.name: backends[r.backend].run for r in plan.routes}
        for name in dict.fromkeys(route.backend for route in plan.routes):
            ready = getattr(backends[name], "ready", None)
            if ready is not None:  # what a first call would load and allocate, which a graph could not capture
                ready(banks, facts.top_k)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (M, H), ids (M, k) and router weights (M, k) -> out (M, H) in x's dtype.

        An id outside of the experts makes its slot contribute exactly zero. Raises BackendError
        for shapes, dtypes or devices that do not fit, and for an `out` that overlaps an input.
        """
        self._check(x, ids, weights, out)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ids, weights = local_ids(narrow_ids(ids), self.first), weights.to(torch.float32)
        facts = CallFacts(*(TensorFacts.of(tensor) for tensor in (x, ids, weights, out)))
        route = self.plan.route(facts)
        if route is not None:
            self.runs[route.name](self.banks, x, ids, weights, out)
        return out

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None) -> None:
        hidden = self.banks.shape.hidden
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
        if out is not None:
            check_overlap({"x": x, "ids": ids, "weights": weights}, {"out": out})
        if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
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
