"""The backends that need the package's native build: declared, so that admission can speak of them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from sm70_moe.decision import Finding
from sm70_moe.errors import BackendError
from sm70_moe.facts import LayerFacts
from sm70_moe.layout import BankLayout, BankShape

if TYPE_CHECKING:
    import torch

    from sm70_moe.weights.banks import Banks
    from sm70_moe.weights.codes import WeightSource

HALF = 2
"""Bytes of an FP16 element."""


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """A backend whose kernels come with the native build (`qpn`, `grouped`, `indexed`).

    There is no such build yet: admission says so in its findings, and `run` refuses.
    """

    name: str
    native: bool = True
    orders: Set[str] = frozenset({"tile32x8"})
    options: Set[str] = frozenset()

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        """Nothing beyond the policy's contract and the checks of the native build."""
        return ()

    def scratch(self, shape: BankShape, top_k: int, tokens: int) -> int:
        """Bytes of the FP16 activations between W13 and W2, (M, k, I)."""
        return tokens * top_k * shape.intermediate * HALF

    def prepare(self, source: WeightSource, layout: BankLayout, shape: BankShape, device: str) -> Banks:
        """Read this rank's weights into banks; every built-in backend reads the same ones."""
        from sm70_moe.weights.banks import prepare

        return prepare(source, layout, shape, device)

    def run(
        self,
        banks: Banks,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        intermediate: torch.Tensor | None = None,
    ) -> NoReturn:
        """Refuse: raises BackendError."""
        raise BackendError(
            f"backend {self.name!r}: no native build in this installation; "
            f"admission keeps such layers on backend 'legacy' (flag auto or 0)"
        )
