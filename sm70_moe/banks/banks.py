"""Prepared banks: a rank's experts in the order that kernels read, filled in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sm70_moe.banks.orders import packing_of
from sm70_moe.banks.packing import Packing, Planes
from sm70_moe.banks.reach import far_reaching
from sm70_moe.errors import BackendError
from sm70_moe.layout import PLANE_ALIGNMENT, WORDS, BankLayout, BankShape, Metadata, Plane
from sm70_moe.numbers.codes import ExpertCodes
from sm70_moe.numbers.rows import ExpertRows, Rows

DTYPES = {"int32": torch.int32, "float16": torch.float16, "uint8": torch.uint8}

Stack = torch.Tensor | Sequence[torch.Tensor]
"""One tensor with the experts first (batched banks), or one tensor for each expert."""


@dataclass(frozen=True, slots=True)
class Bank:
    """One matrix of every expert, K = `rows` and N = `columns`.

    `planes` are contiguous tensors by name ("words", and "metadata" or "scales" and "zeros"), each
    at a multiple of 256 bytes; `layout.Order.planes` has their shapes. In a batched bank a plane is
    one tensor with the experts first, and an expert's bytes start at a multiple of the order's
    `record`, so that a kernel can take `data_ptr()`.
    """

    rows: int
    columns: int
    packing: Packing
    stored: Metadata
    planes: Mapping[str, Stack]

    @classmethod
    def allocate(cls, rows: int, columns: int, experts: int, layout: BankLayout, device: torch.device) -> Bank:
        """A bank with undefined contents. Raises BackendError for an unknown order and for sizes that
        it does not hold.
        """
        packing = packing_of(layout.order)
        fault = packing.order.fault(layout.metadata, rows, columns, layout.group)
        if fault is not None:
            raise BackendError(f"bank in order {layout.order!r} with {fault}")
        planes = packing.order.planes(layout.metadata, rows, columns, layout.group)
        stacks = {plane.name: _stack(plane, experts, layout.batched, device) for plane in planes}
        return cls(rows, columns, packing, layout.metadata, stacks)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of every plane."""
        for stack in self.planes.values():
            yield from (stack,) if isinstance(stack, torch.Tensor) else stack

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def batched(self) -> bool:
        """Is each plane one tensor, so that an expert can be picked without asking the host?"""
        return all(isinstance(stack, torch.Tensor) for stack in self.planes.values())

    def of(self, expert: int) -> Planes:
        """The planes of one expert: views."""
        return {name: stack[expert] for name, stack in self.planes.items()}

    def run(self, experts: range) -> Planes:
        """The planes of neighbouring experts of a batched bank, experts first: views."""
        return {name: whole(stack)[experts.start : experts.stop] for name, stack in self.planes.items()}

    def fill(self, planes: Planes, *parts: Rows) -> None:
        """Write a matrix of one expert, or of several, into its planes; `Banks` has checked dtypes and shapes.

        Several parts are interleaved: column c of part p is column `len(parts) * c + p`.
        """
        for place, part in enumerate(parts):
            self.packing.put(part.words, planes[WORDS], place, len(parts))
        scales, zeros = (interleaved([getattr(part, name) for part in parts]) for name in ("scales", "zeros"))
        for name, values in self.packing.encode(self.stored, scales, zeros).items():
            planes[name].copy_(values.reshape(planes[name].shape))

    def take(self, expert: int) -> Rows:
        """One expert's matrix as it was written; of zeros, those of `metadata.zeros_of`."""
        planes = self.of(expert)
        words = self.packing.columns(planes[WORDS], self.columns).t().contiguous()
        scales, zeros = self.packing.zeros(self.stored, planes)
        return Rows(words, zeros, scales)

    def metadata(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """FP16 scale and bias of one expert, each (K/g, N), the same bits from any metadata."""
        return self.packing.groups(self.stored, self.of(expert))

    def dequantise(self, expert: int) -> torch.Tensor:
        """FP16 weights (N, K) of one expert, a row for each column as it lies in the bank."""
        return self.packing.dequantise(self.stored, self.of(expert), self.columns)

    def gather(self, experts: torch.Tensor) -> torch.Tensor:
        """FP16 weights (P, N, K) of the experts that a tensor (P,) on the device names, of a batched bank.

        The same bits as `dequantise`; nothing waits for the device.
        """
        planes = {name: torch.index_select(whole(stack), 0, experts) for name, stack in self.planes.items()}
        return self.packing.dequantise_many(self.stored, planes, self.columns)


def whole(stack: Stack) -> torch.Tensor:
    """The tensor of a batched plane."""
    if not isinstance(stack, torch.Tensor):
        raise BackendError("banks with a tensor for each expert: accepted are batched banks")
    return stack


@dataclass(frozen=True, slots=True)
class Banks:
    """Both banks of one layer for one rank: W13 (hidden, 2 * intermediate), W2 (intermediate, hidden).

    `filled` are the experts that have arrived; a kernel calls `require_complete` before it reads.
    `reaches` are those whose sums of W2 can leave FP16 (`reach.far_reaching`).
    """

    layout: BankLayout
    shape: BankShape
    device: torch.device
    w13: Bank
    w2: Bank
    filled: set[int] = field(default_factory=set, repr=False)
    reaches: dict[int, float] = field(default_factory=dict, repr=False)

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

    def fill(self, expert: int, given: ExpertCodes | ExpertRows) -> None:
        """Write one expert in place; only temporaries of this expert are made.

        Different experts may be filled from different threads. Raises BackendError for an expert,
        shape or dtype that does not fit.
        """
        self._expect(range(expert, expert + 1))
        found = ExpertRows.of(given) if isinstance(given, ExpertCodes) else given
        self._require(found, f"expert {expert}", ())
        self._write(self.w13.of(expert), self.w2.of(expert), found)
        self._arrived(range(expert, expert + 1), found.down.alone)

    def fill_batch(self, experts: range, given: ExpertRows) -> None:
        """Write neighbouring experts, which are the first dimension of `given`; as `fill` otherwise."""
        self._expect(experts)
        self._require(given, f"experts {experts.start} to {experts.stop - 1}", (len(experts),))
        if self.layout.batched:
            self._write(self.w13.run(experts), self.w2.run(experts), given)
        else:
            for place, expert in enumerate(experts):
                self._write(self.w13.of(expert), self.w2.of(expert), given.of_expert(place))
        self._arrived(experts, given.down)

    def _arrived(self, experts: range, down: Rows) -> None:
        """They are there; `down` has them in the first dimension. From any of several threads."""
        for place, reach in far_reaching(down).items():
            self.reaches[experts[place]] = reach
        self.filled.update(experts)

    def _expect(self, experts: range) -> None:
        """These experts exist, and are not filled until they are written."""
        for expert in (experts.start, experts.stop - 1):
            if not 0 <= expert < self.shape.experts:
                raise BackendError(f"expert {expert}; accepted are 0 to {self.shape.experts - 1}")
        self.filled.difference_update(experts)
        for expert in experts:
            self.reaches.pop(expert, None)

    def _require(self, found: ExpertRows, name: str, leading: tuple[int, ...]) -> None:
        inner, outer, group = self.shape.intermediate, self.shape.hidden, self.layout.group
        found.gate.require(f"{name} gate", outer, inner, group, leading)
        found.up.require(f"{name} up", outer, inner, group, leading)
        found.down.require(f"{name} down", inner, outer, group, leading)

    def _write(self, w13: Planes, w2: Planes, found: ExpertRows) -> None:
        both = (found.gate, found.up)
        self.w13.fill(w13, *(both if self.layout.interleaved else (beside(*both),)))
        self.w2.fill(w2, found.down)

    def take(self, expert: int) -> ExpertRows:
        """One expert as it was written: what `fill` takes."""
        gate, up = _part(self.w13.take(expert), self.layout.interleaved)
        return ExpertRows(gate, up, self.w2.take(expert))


def convert(banks: Banks, layout: BankLayout) -> Banks:
    """The same weights in another layout; both hold what the other does, so that converting back
    gives the same bytes.

    Four bytes do not hold a zero that changes no weight (`metadata.zeros_of`): there, and only
    there, it becomes another one. Raises BackendError for another group, banks that are not
    complete, and what `allocate` refuses.
    """
    if layout.group != banks.layout.group:
        raise BackendError(f"convert group {banks.layout.group} to {layout.tag}: accepted is the same group")
    banks.require_complete()
    found = allocate(layout, banks.shape, banks.device)
    for expert in range(banks.shape.experts):
        found.fill(expert, banks.take(expert))
    return found


def allocate(layout: BankLayout, shape: BankShape, device: str | torch.device) -> Banks:
    """Banks without weights. Raises BackendError for an unknown order, or sizes that it does not hold."""
    place = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as tensors have it
    # readers' threads fill them: tensors that are made under inference_mode could only be written under it
    with torch.inference_mode(False):
        w13 = Bank.allocate(shape.hidden, 2 * shape.intermediate, shape.experts, layout, place)
        w2 = Bank.allocate(shape.intermediate, shape.hidden, shape.experts, layout, place)
    return Banks(layout, shape, place, w13, w2)


def _stack(plane: Plane, experts: int, batched: bool, device: torch.device) -> Stack:
    if batched:
        return aligned((experts, *plane.shape), DTYPES[plane.dtype], device)
    return [aligned(plane.shape, DTYPES[plane.dtype], device) for _ in range(experts)]


def aligned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor without values whose address is a multiple of PLANE_ALIGNMENT.

    torch's own CPU memory starts at multiples of 64 only.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    slab = torch.empty(size + PLANE_ALIGNMENT - 1, dtype=torch.uint8, device=device)
    start = -slab.data_ptr() % PLANE_ALIGNMENT
    return slab[start : start + size].view(dtype).view(shape)


def interleaved(parts: list[torch.Tensor]) -> torch.Tensor:
    """Columns of several matrices in turn."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1).flatten(-2)


def beside(gate: Rows, up: Rows) -> Rows:
    """Gate and up as one matrix, all gates first."""
    pairs = ((gate.words, up.words), (gate.zeros, up.zeros), (gate.scales, up.scales))
    return Rows(*(torch.cat(pair, dim=-1) for pair in pairs))


def _part(both: Rows, interleaved: bool) -> tuple[Rows, Rows]:
    """Gate and up of a joint matrix."""

    def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = values.shape[1] // 2
        return (values[:, 0::2], values[:, 1::2]) if interleaved else (values[:, :middle], values[:, middle:])

    parts = (halves(both.words), halves(both.zeros), halves(both.scales))
    return Rows(*(gate for gate, _ in parts)), Rows(*(up for _, up in parts))
