"""What runs a layer: the protocol that every backend keeps.

A backend is small and imports no torch until `prepare` or `run`: admission asks it what it can do
on machines that have no torch.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sm70_moe.decision import Finding
from sm70_moe.facts import LayerFacts
from sm70_moe.layout import BankLayout, BankShape

if TYPE_CHECKING:
    import torch

    from sm70_moe.banks.banks import Banks
    from sm70_moe.numbers.codes import WeightSource


@runtime_checkable
class Backend(Protocol):
    """Runs routes of one kind.

    `orders` are the weight orders it reads (`BankLayout.order`), `options` the option features it
    honours; `native` says that it needs the package's native build.
    """

    @property
    def name(self) -> str: ...

    @property
    def native(self) -> bool: ...

    @property
    def orders(self) -> Set[str]: ...

    @property
    def options(self) -> Set[str]: ...

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        """What this backend itself demands of a layer, beyond the policy's contract."""

    def scratch(self, shape: BankShape, top_k: int, tokens: int) -> int:
        """Bytes of working memory that one call of `tokens` rows takes at most."""

    def prepare(self, source: WeightSource, layout: BankLayout, shape: BankShape, device: str) -> Banks:
        """Read this rank's weights into banks of that layout."""

    def run(
        self,
        banks: Banks,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        intermediate: torch.Tensor | None = None,
    ) -> None:
        """Write the layer's output for one call.

        x (M, H) and out (M, H) share a dtype; ids (M, k) INT32; weights (M, k) FP32. If given,
        `intermediate` (M, k, I) in x's dtype receives the activations between W13 and W2; rows of
        slots with an invalid id are zero.
        """


@runtime_checkable
class Configurable(Protocol):
    """A backend that runs in another way for layers that have some of its `options`."""

    def with_options(self, names: Set[str]) -> Backend:
        """The backend for a layer for which these options, and no others, were admitted."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A plug-in that does not load; `error` is the text of what it raised."""

    name: str
    error: str
