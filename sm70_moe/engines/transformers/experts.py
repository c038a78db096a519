"""The module that stands where transformers has a layer's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sm70_moe.engines.transformers.host import SiLUActivation, experts
from sm70_moe.engines.transformers.stored import Stored
from sm70_moe.errors import BackendError
from sm70_moe.plan.plan import Plan
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.operator import register

SILU = (torch.nn.SiLU, SiLUActivation)


class Sm70MoeExperts(torch.nn.Module):
    """The experts of one layer, run by `torch.ops.sm70_moe.experts`.

    Has no parameters: the weights are banks, in the layer. `state_dict` gives them in the
    checkpoint's format and names. They stay on the device they were loaded to.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer: MoELayer | None = None
        self.stored: Stored | None = None
        self.handle = self.digest = ""

    def hold(self, layer: MoELayer, stored: Stored) -> None:
        """Take the prepared layer, and how its checkpoint stores it."""
        self.layer, self.stored = layer, stored
        self.handle, self.digest = register(layer), layer.plan.digest

    @property
    def plan(self) -> Plan:
        """What was decided for this layer."""
        return self._held().plan

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (..., H), ids INT64 and weights (tokens, k) -> as hidden_states.

        An id outside of the experts contributes nothing, as transformers' sentinel for experts of
        other ranks means it.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        call = (x, top_k_index, top_k_weights, self.digest, self.handle)
        if torch.is_grad_enabled() and (x.requires_grad or top_k_weights.requires_grad):
            out: torch.Tensor = ForwardOnly.apply(*call)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        else:
            out = torch.ops.sm70_moe.experts(*call)
        return out.view(hidden_states.shape)

    def extra_repr(self) -> str:
        if self.layer is None:
            return f"{self.name}, not loaded"
        return f"{self.name}, routes={', '.join(route.name for route in self.plan.routes)}"

    def _held(self) -> MoELayer:
        if self.layer is None:
            raise BackendError(f"{self.name}: not loaded; accepted is a model from from_pretrained")
        return self.layer

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Dtypes of a model may change, its experts' device may not: banks are not copied."""
        if self.layer is not None:
            here = self.layer.banks.device
            there = fn(torch.empty(0, dtype=torch.float16, device=here)).device
            if there != here:
                raise BackendError(
                    f"{self.name}: moving banks from {here} to {there}; accepted is device_map={str(there)!r} "
                    "for from_pretrained, which loads them there"
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layer is not None and self.stored is not None:
            destination.update((prefix + tail, tensor) for tail, tensor in self.stored.tensors(self.layer.banks))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """`load_state_dict` would drop the weights in silence if it is not strict."""
        if any(name.startswith(prefix) for name in state_dict):
            raise BackendError(f"{self.name}: banks are filled by from_pretrained, not by load_state_dict")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sm70MoeExperts:
        """A copy of a model shares the banks, which nothing changes."""
        copied = type(self)(self.name)
        copied.train(self.training)
        memo[id(self)] = copied
        copied.layer, copied.stored, copied.handle, copied.digest = self.layer, self.stored, self.handle, self.digest
        return copied


class ForwardOnly(torch.autograd.Function):
    """The operator where gradients are recorded: models are often called so, and never mean it."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> torch.Tensor:
        ctx.name = call[-1]
        return torch.ops.sm70_moe.experts(*call)  # type: ignore[no-any-return]  # an operator is Any

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise BackendError(
            f"{ctx.name}: backward through experts; accepted is inference (torch.no_grad or inference_mode): their "
            "weights are 4-bit codes, and what stands before them would get no gradient"
        )


def arithmetic(module: Any) -> dict[str, Any]:
    """What transformers' own module computes, as facts; None where it does not say."""
    activation = getattr(module, "act_fn", None)
    name = None if activation is None else "silu" if isinstance(activation, SILU) else type(activation).__name__
    gate = getattr(type(module), "_apply_gate", None)
    if gate is None:
        name = None
    elif gate is not experts._default_apply_gate:
        name = f"{name} with a gate of {type(module).__name__}'s own"
    if getattr(module, "has_post_expert_norm", False):
        name = f"{name} with a norm after each expert"
    return {
        "activation": name,
        "gated": getattr(module, "has_gate", None),
        "bias": getattr(module, "has_bias", None),
    }
