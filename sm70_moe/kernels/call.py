"""Call: the tensors of one layer call, as every backend, layer and trial hands them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Call:
    """Inputs and outputs of one call of M tokens, k experts each.

    x (M, H) and out (M, H) share a dtype; ids (M, k) INT32; weights (M, k) FP32. If given,
    `intermediate` (M, k, I) in x's dtype receives the activations between W13 and W2; rows of slots
    with an invalid id are zero.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    intermediate: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    def chunks(self, tokens: int) -> Iterator[Call]:
        """The call in pieces of at most `tokens` rows."""
        for start in range(0, self.x.shape[0], tokens):
            rows = slice(start, start + tokens)
            export = None if self.intermediate is None else self.intermediate[rows]
            yield Call(self.x[rows], self.ids[rows], self.weights[rows], self.out[rows], export)
