"""The form in which banks take a matrix: row words, zeros and scales. Codes become it in one step.

A source that has packed words can give this form directly and is read several times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sm70_moe.errors import BackendError
from sm70_moe.layout import WORD_ROWS
from sm70_moe.weights.codes import Codes, ExpertCodes
from sm70_moe.weights.rowwords import row_words


@dataclass(frozen=True, slots=True)
class Rows:
    """One matrix of K rows and N columns as one rank holds it.

    `words` INT32 (K/8, N) hold eight consecutive K each (`rowwords.ROW_ORDER`), `zeros` (K/g, N)
    are uint8 in 0..15, `scales` (K/g, N) FP16.
    """

    words: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, codes: Codes) -> Rows:
        """Pack codes; K must divide by 8."""
        return cls(row_words(codes.codes), codes.zeros, codes.scales)

    def require(self, name: str, rows: int, columns: int, group: int) -> None:
        """Raise BackendError, naming `name`, for a dtype or shape other than these sizes have."""
        for kind, tensor, dtype, height in (
            ("words", self.words, torch.int32, rows // WORD_ROWS),
            ("zeros", self.zeros, torch.uint8, rows // group),
            ("scales", self.scales, torch.float16, rows // group),
        ):
            if tensor.dtype is not dtype or tensor.shape != (height, columns):
                raise BackendError(
                    f"{name}: {kind} are {tensor.dtype} {list(tensor.shape)}; accepted is {dtype} {[height, columns]}"
                )


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """One expert's three matrices: gate and up (hidden, intermediate), down (intermediate, hidden)."""

    gate: Rows
    up: Rows
    down: Rows

    @classmethod
    def of(cls, codes: ExpertCodes) -> ExpertRows:
        return cls(Rows.of(codes.gate), Rows.of(codes.up), Rows.of(codes.down))
