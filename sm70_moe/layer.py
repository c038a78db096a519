"""MoELayer: banks plus plan. The only code of this package on an engine's hot path."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sm70_moe.errors import BackendError
from sm70_moe.facts import CallFacts, TensorFacts
from sm70_moe.kernels import Backend
from sm70_moe.plan import Plan
from sm70_moe.weights.banks import Banks

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


class MoELayer:
    """The experts of one layer on one rank.

    `runs` maps each admitted route to what runs it. Ids may be INT32 or INT64, router weights FP16,
    BF16 or FP32: they are converted before the route is chosen. No tensor value is read to choose it.
    """

    def __init__(self, plan: Plan, banks: Banks, backends: Mapping[str, Backend]) -> None:
        self.plan, self.banks = plan, banks
        self.runs: dict[str, Callable[..., None]] = {r.name: backends[r.backend].run for r in plan.routes}

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
        ids, weights = narrow_ids(ids), weights.to(torch.float32)
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
