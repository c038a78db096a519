"""The method of one layer's experts: receives its tensors, makes its banks, runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sm70_moe.engines.arrivals import Arrivals, ArrivedSource
from sm70_moe.engines.vllm.engine import Engine
from sm70_moe.engines.vllm.host import symbol
from sm70_moe.engines.vllm.names import HALVES, MATRICES
from sm70_moe.errors import BackendError
from sm70_moe.numbers.decoding import DTYPES
from sm70_moe.numbers.formats import Part
from sm70_moe.plan.plan import Plan
from sm70_moe.runtime import operator
from sm70_moe.runtime.layer import MoELayer

BANKS = {"w13": ("gate", "up"), "w2": ("down",)}


class TensorLoader:
    """vLLM calls it with each tensor that belongs to one parameter, whole, from every rank's files."""

    supports_moe_loading = True

    def __init__(self, engine: Engine, arrivals: Arrivals, kind: str) -> None:
        self.engine, self.arrivals, self.kind = engine, arrivals, kind
        self.__name__ = type(self).__name__  # hosts ask functions for theirs

    def __call__(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Raises CheckpointError naming the tensor if it is not what the layer needs."""
        self.engine.agree()
        matrix = MATRICES[shard_id]
        part = self.arrivals.take(expert_id, matrix, self.kind, loaded_weight)
        if part is not None and param.numel():
            local = self.arrivals.parts.share.local_id(expert_id)
            param.data[local, HALVES[matrix][1]].copy_(part)
        return part is not None if return_success else None


class ExpertsMethod(symbol("FusedMoEMethodBase")):  # type: ignore[misc]  # vLLM's class
    """Runs one layer under a plan. `plan` is what was admitted; the ranks may agree on another one."""

    def __init__(self, engine: Engine, plan: Plan, layer: Any, names: Mapping[str, str]) -> None:
        super().__init__(layer.moe_config)
        self.engine, self.plan = engine, plan
        self.arrivals = Arrivals(plan.admission.facts, names)
        self.experts: MoELayer | None = None
        self.handle = self.digest = ""
        self.constant = symbol("FUSED_MOE_UNQUANTIZED_CONFIG")
        engine.expect(plan)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters that hold this rank's part of every tensor until the banks are made.

        Raises BackendError if vLLM cuts the layer in another way than the facts say.
        """
        shape = self.arrivals.parts.share.shape
        asked, known = (num_experts, hidden_size, intermediate_size_per_partition), (
            shape.experts, shape.hidden, shape.intermediate
        )  # fmt: skip
        if asked != known:
            raise BackendError(
                f"{self.plan.layer}: vLLM asks for experts, hidden and intermediate {asked}; accepted is {known}"
            )
        for name, part, sizes in self._parameters():
            param = torch.nn.Parameter(torch.empty(sizes, dtype=DTYPES[part.dtypes[0]]), requires_grad=False)
            param.weight_loader = TensorLoader(self.engine, self.arrivals, part.kind)  # type: ignore[attr-defined]  # vLLM's way
            layer.register_parameter(name, param)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all came, make the banks, let the sources go.

        Raises CheckpointError that names missing tensors, unless the weights are dummies.
        """
        if self.experts is not None:
            return
        if not self.engine.dummy:
            self.arrivals.require_complete()
        source = ArrivedSource(self.arrivals, self._stacks(layer))
        device = str(next(iter(source.stacks.values())).device)
        self.experts = self.engine.prepare(self.plan.layer, source, device)
        for name, _, _ in self._parameters():
            delattr(layer, name)
        self.digest, self.handle = self.experts.plan.digest, operator.register(self.experts, self.plan.layer)
        self.engine.methods.append(self)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """A constant: None would be asked for again at every forward, which compilers trace."""
        return self.constant

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *shared: Any, **more: Any) -> Any:
        """x (M, H), ids and router weights (M, k) -> this rank's share of (M, H).

        One operator and nothing else: compilers trace what stands here.
        """
        return torch.ops.sm70_moe.experts(x, topk_ids, topk_weights, self.digest, self.handle)

    def _parameters(self) -> Iterator[tuple[str, Part, tuple[int, ...]]]:
        """Name, part and shape: (experts, 2 or 1 matrices, ...); nothing is kept of what is only looked at."""
        parts = self.arrivals.parts
        for bank, matrices in BANKS.items():
            for part in parts.form.all:
                own = part.shape(parts.own(matrices[0]))
                sizes = (len(parts.share.experts), len(matrices), *own) if parts.stored(part) else (0,)
                yield f"{bank}_{part.kind}", part, sizes

    def _stacks(self, layer: Any) -> dict[tuple[str, str], torch.Tensor]:
        """Views of the parameters by matrix and kind; zeros only if the checkpoint has them, or any dummy has."""
        parts, come = self.arrivals.parts, self.arrivals.kinds
        return {
            (matrix, part.kind): getattr(layer, f"{bank}_{part.kind}").data[:, place]
            for matrix, (bank, place) in HALVES.items()
            for part in parts.form.all
            if parts.stored(part) and (part.kind in come or self.engine.dummy)
        }
