"""The one form that every checkpoint format is read into: integer codes, zeros, FP16 scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Codes:
    """One quantised matrix of K rows (inputs) and N columns (outputs), as one rank holds it.

    `codes` (K, N) and `zeros` (K/g, N) are uint8 in 0..15, `scales` (K/g, N) is float16 and may be
    negative. Weight (k, n) is `codes[k, n]` with scale and zero of row group `k // g`.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertCodes:
    """One expert's three matrices: gate and up (hidden, intermediate), down (intermediate, hidden)."""

    gate: Codes
    up: Codes
    down: Codes


class WeightSource(Protocol):
    """One rank's share of one layer, readable expert by expert in any order and from any thread."""

    @property
    def experts(self) -> int:
        """Number of experts of this rank."""

    def read(self, expert: int, group: int) -> ExpertCodes:
        """Codes of one expert, scales and zeros repeated for groups of `group` rows."""
