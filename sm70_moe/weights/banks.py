"""Prepared banks: a rank's experts in the order that kernels read, filled in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sm70_moe.errors import BackendError
from sm70_moe.layout import WORD_ROWS, BankLayout, BankShape, Metadata
from sm70_moe.weights import metadata as group_metadata
from sm70_moe.weights import tiles
from sm70_moe.weights.codes import Codes, ExpertCodes, WeightSource

Progress = Callable[[int, int], None]
"""Called with the number of experts done and of all experts."""


@dataclass(frozen=True, slots=True)
class Bank:
    """One matrix of every expert, K = `rows` and N = `columns`.

    `weights` are INT32 (N/32, K/8, 32) per expert, `groups` the metadata in the form `stored`;
    batched banks are one tensor with the experts first, others a list of tensors.
    """

    rows: int
    columns: int
    stored: Metadata
    weights: torch.Tensor | Sequence[torch.Tensor]
    groups: torch.Tensor | Sequence[torch.Tensor]

    @classmethod
    def allocate(cls, rows: int, columns: int, experts: int, layout: BankLayout, device: torch.device) -> Bank:
        """A bank with undefined contents. Raises BackendError if the group or a word does not divide K."""
        if layout.group < 1 or rows % layout.group or rows % WORD_ROWS:
            raise BackendError(f"bank with K = {rows}: accepted are multiples of group {layout.group} and {WORD_ROWS}")
        words = tiles.tile_shape(rows, columns)
        groups = group_metadata.metadata_shape(layout.metadata, rows // layout.group, columns)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | list[torch.Tensor]:
            if layout.batched:
                return torch.empty((experts, *shape), dtype=dtype, device=device)
            return [torch.empty(shape, dtype=dtype, device=device) for _ in range(experts)]

        dtype = group_metadata.DTYPES[layout.metadata]
        return cls(rows, columns, layout.metadata, empty(words, torch.int32), empty(groups, dtype))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for bank in (self.weights, self.groups) for tensor in bank)

    def fill(self, expert: int, codes: Codes) -> None:
        """Write one expert's matrix; dtypes and shapes were checked by `Banks.fill`."""
        self.weights[expert].copy_(tiles.pack(codes.codes))
        self.groups[expert].copy_(group_metadata.encode(self.stored, codes.scales, codes.zeros))

    def metadata(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """FP16 scale and bias of one expert, each (K/g, N), the same bits from either metadata."""
        return group_metadata.decode(self.stored, self.groups[expert])

    def dequantise(self, expert: int) -> torch.Tensor:
        """FP16 weights (N, K) of one expert, a row for each column as it lies in the bank."""
        return tiles.dequantise(self.weights[expert], *self.metadata(expert))


@dataclass(frozen=True, slots=True)
class Banks:
    """Both banks of one layer for one rank: W13 (hidden, 2 * intermediate), W2 (intermediate, hidden).

    `filled` are the experts that have arrived; a kernel calls `require_complete` before it reads.
    """

    layout: BankLayout
    shape: BankShape
    device: torch.device
    w13: Bank
    w2: Bank
    filled: set[int] = field(default_factory=set, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of both banks on the device."""
        return self.w13.nbytes + self.w2.nbytes

    @property
    def complete(self) -> bool:
        return len(self.filled) == self.shape.experts

    def require_complete(self) -> None:
        """Raise BackendError that names the experts whose weights never arrived."""
        if not self.complete:
            absent = [expert for expert in range(self.shape.experts) if expert not in self.filled]
            shown = ", ".join(map(str, absent[:8]))
            more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            raise BackendError(f"banks have no weights for experts {shown}{more} of {self.shape.experts}")

    def fill(self, expert: int, codes: ExpertCodes) -> None:
        """Write one expert in place; only temporaries of this expert are made.

        Different experts may be filled from different threads. Raises BackendError for an expert,
        shape or dtype that does not fit.
        """
        if not 0 <= expert < self.shape.experts:
            raise BackendError(f"expert {expert}; accepted are 0 to {self.shape.experts - 1}")
        inner, outer = self.shape.intermediate, self.shape.hidden
        for name, matrix, k, n in (
            ("gate", codes.gate, outer, inner),
            ("up", codes.up, outer, inner),
            ("down", codes.down, inner, outer),
        ):
            _require(f"expert {expert} {name}", matrix, k, n, self.layout.group)
        self.filled.discard(expert)
        self.w13.fill(expert, _join(codes.gate, codes.up, self.layout.interleaved))
        self.w2.fill(expert, codes.down)
        self.filled.add(expert)


def allocate(layout: BankLayout, shape: BankShape, device: str | torch.device) -> Banks:
    """Banks without weights. Raises BackendError for an order other than this module's, or sizes
    that the group or a word does not divide.
    """
    if layout.order != tiles.ORDER:
        raise BackendError(f"bank order {layout.order!r}; accepted is {tiles.ORDER!r}")
    place = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as tensors have it
    w13 = Bank.allocate(shape.hidden, 2 * shape.intermediate, shape.experts, layout, place)
    w2 = Bank.allocate(shape.intermediate, shape.hidden, shape.experts, layout, place)
    return Banks(layout, shape, place, w13, w2)


def prepare(
    source: WeightSource,
    layout: BankLayout,
    shape: BankShape,
    device: str | torch.device,
    progress: Progress | None = None,
) -> Banks:
    """Read every expert of a rank into new banks.

    Raises BackendError if source and shape disagree, and what the source raises.
    """
    if source.experts != shape.experts:
        raise BackendError(f"source with {source.experts} experts for banks with {shape.experts}")
    banks = allocate(layout, shape, device)
    for expert in range(shape.experts):
        banks.fill(expert, source.read(expert, layout.group))
        if progress is not None:
            progress(expert + 1, shape.experts)
    return banks


def _join(gate: Codes, up: Codes, interleaved: bool) -> Codes:
    """Gate and up as one matrix: columns 2c and 2c + 1, or all gates first."""

    def both(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return torch.stack((first, second), dim=-1).flatten(1)
        return torch.cat((first, second), dim=1)

    return Codes(both(gate.codes, up.codes), both(gate.zeros, up.zeros), both(gate.scales, up.scales))


def _require(name: str, codes: Codes, rows: int, columns: int, group: int) -> None:
    for kind, tensor, dtype, height in (
        ("codes", codes.codes, torch.uint8, rows),
        ("zeros", codes.zeros, torch.uint8, rows // group),
        ("scales", codes.scales, torch.float16, rows // group),
    ):
        if tensor.dtype is not dtype or tensor.shape != (height, columns):
            raise BackendError(
                f"{name}: {kind} are {tensor.dtype} {list(tensor.shape)}; accepted is {dtype} {[height, columns]}"
            )
