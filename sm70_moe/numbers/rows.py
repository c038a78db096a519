"""The form in which banks take a matrix: row words, zeros and scales. Codes become it in one step.

A source that has packed words can give this form directly and is read several times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sm70_moe.errors import BackendError
from sm70_moe.layout import WORD_ROWS
from sm70_moe.numbers.codes import Codes, ExpertCodes
from sm70_moe.numbers.rowwords import row_words


@dataclass(frozen=True, slots=True)
class Rows:
    """One matrix of K rows and N columns as one rank holds it, or those of several experts, then with a
    dimension in front.

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

    @classmethod
    def stacked(cls, several: Sequence[Rows]) -> Rows:
        """Matrices of several experts in one."""
        words, zeros, scales = zip(*((one.words, one.zeros, one.scales) for one in several), strict=True)
        return cls(torch.stack(words), torch.stack(zeros), torch.stack(scales))

    @property
    def alone(self) -> Rows:
        """One expert's matrix as that of several: views."""
        return Rows(self.words.unsqueeze(0), self.zeros.unsqueeze(0), self.scales.unsqueeze(0))

    def of_expert(self, place: int) -> Rows:
        """One of several experts."""
        return Rows(self.words[place], self.zeros[place], self.scales[place])

    def require(self, name: str, rows: int, columns: int, group: int, leading: tuple[int, ...] = ()) -> None:
        """Raise BackendError, naming `name`, for a dtype or shape other than these sizes have."""
        for kind, tensor, dtype, height in (
            ("words", self.words, torch.int32, rows // WORD_ROWS),
            ("zeros", self.zeros, torch.uint8, rows // group),
            ("scales", self.scales, torch.float16, rows // group),
        ):
            wanted = (*leading, height, columns)
            if tensor.dtype is not dtype or tensor.shape != wanted:
                raise BackendError(
                    f"{name}: {kind} are {tensor.dtype} {list(tensor.shape)}; accepted is {dtype} {list(wanted)}"
                )


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Three matrices of one expert, or of several: gate and up (hidden, intermediate), down (intermediate, hidden)."""

    gate: Rows
    up: Rows
    down: Rows

    @classmethod
    def of(cls, codes: ExpertCodes) -> ExpertRows:
        return cls(Rows.of(codes.gate), Rows.of(codes.up), Rows.of(codes.down))

    @classmethod
    def stacked(cls, several: Sequence[ExpertRows]) -> ExpertRows:
        """Several experts in one, experts first."""
        return cls(
            Rows.stacked([one.gate for one in several]),
            Rows.stacked([one.up for one in several]),
            Rows.stacked([one.down for one in several]),
        )

    def of_expert(self, place: int) -> ExpertRows:
        """One of several experts."""
        return ExpertRows(self.gate.of_expert(place), self.up.of_expert(place), self.down.of_expert(place))
