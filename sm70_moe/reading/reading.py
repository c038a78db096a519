"""Reads one rank's part of a matrix from the files: the bytes of its rows and columns, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from sm70_moe.checkpoint.checkpoint import CheckpointLayer
from sm70_moe.checkpoint.headers import Headers
from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.decoding import decode_rows, turned
from sm70_moe.numbers.formats import Axis, Format, Part, Spans
from sm70_moe.numbers.rows import Rows
from sm70_moe.numbers.scales import half
from sm70_moe.reading.pieces import Files, Piece
from sm70_moe.reading.shard import covering_groups, source_groups

Form = TypeVar("Form", Codes, Rows)
Decode = Callable[[Format, Mapping[str, torch.Tensor], tuple[int, ...], str], Form]
"""`decoding.decode` or `decoding.decode_rows`."""

MISLABELLED = (7, 9)
"""Zeros of a symmetric file (8) that were stored by one of GPTQ's two conventions and read by the other."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where one expert's gate, up or down stands: the scheme's name for it, its K, N and rows per group.

    `offset` is its first column in the stored matrix, which has `width` columns: gate and up may
    be halves of one.
    """

    name: str
    k: int
    n: int
    group: int
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A rank's rows and columns of a matrix."""

    matrix: Matrix
    rows: range
    columns: range

    @property
    def groups(self) -> range:
        """The groups that the rows touch."""
        return covering_groups(self.rows.start, len(self.rows), self.matrix.group)

    @property
    def spans(self) -> Spans:
        """The same in the stored matrix, of which this one may be a half."""
        offset = self.matrix.offset
        columns = range(offset + self.columns.start, offset + self.columns.stop)
        return {Axis.K: self.rows, Axis.N: columns, Axis.GROUP: self.groups}


class Reader:
    """Reads matrices of one layer that `Checkpoint.check` has accepted. Keeps no file open.

    `vanished` are the tensors with scales that became 0, no weight changed, and how many of them did;
    what is read twice is there twice.
    """

    def __init__(self, headers: Headers, layer: CheckpointLayer) -> None:
        assert layer.form is not None
        self.headers, self.layer, self.form = headers, layer, layer.form
        self.vanished: list[tuple[str, int]] = []

    def matrix(self, files: Files, expert: int, part: MatrixPart, group: int, decode: Decode[Form]) -> Form:
        """One part in the form that `decode` gives, scales and zeros repeated for groups of `group` rows.

        Raises BackendError for a group that does not fit, CheckpointError naming a tensor whose
        values are not what the format allows.
        """
        matrix, rows, cover = part.matrix, part.rows, part.groups
        groups = source_groups(rows.start, len(rows), matrix.group, group)
        name = self._name(expert, matrix, "")
        found = {kind: files.read([piece], [name + kind])[0] for kind, piece in self.pieces(expert, part).items()}
        self._check_values(name, matrix, found, rows)
        self._take_scales(name, found, part)
        decoded = decode(self.form, found, tuple(number - cover.start for number in groups), name)
        self._check_zeros(name, decoded.zeros)
        return decoded

    def batch(self, files: Files, experts: range, part: MatrixPart, group: int) -> Rows:
        """The same part of several experts, first dimension; raises what `matrix` raises for each."""
        pieces = [self.pieces(expert, part) for expert in experts]
        if len({tuple(piece.form for piece in one.values()) for one in pieces}) > 1:  # of two float types
            found = [self.matrix(files, expert, part, group, decode_rows) for expert in experts]
            return Rows.stacked(found)
        try:
            return self._batch(files, experts, part, group, pieces)
        except CheckpointError:
            for expert in experts:
                self.matrix(files, expert, part, group, decode_rows)  # raises it with the tensor's name
            raise

    def _batch(
        self, files: Files, experts: range, part: MatrixPart, group: int, pieces: list[dict[str, Piece]]
    ) -> Rows:
        names = [self._name(expert, part.matrix, "") for expert in experts]
        groups = source_groups(part.rows.start, len(part.rows), part.matrix.group, group)
        found = {kind: files.read([one[kind] for one in pieces], [name + kind for name in names]) for kind in pieces[0]}
        for place, name in enumerate(names):
            self._check_values(name, part.matrix, {kind: several[place] for kind, several in found.items()}, part.rows)
        self._take_scales(names[0], found, part)
        decoded = decode_rows(self.form, found, tuple(number - part.groups.start for number in groups))
        for name, zeros in zip(names, decoded.zeros, strict=True):
            self._check_zeros(name, zeros)
        return decoded

    def pieces(self, expert: int, part: MatrixPart) -> dict[str, Piece]:
        """Where the files have one part, by kind of tensor."""
        spans = part.spans
        return {found.kind: self._piece(expert, part.matrix.name, found, spans) for found in self.layer.parts}

    def _piece(self, expert: int, name: str, part: Part, spans: Spans) -> Piece:
        entry = self.layer.entry(expert, name, part.kind)
        assert entry is not None  # `check` has seen it
        stacked = self.layer.scheme is not None and self.layer.scheme.stacked
        if part.dims[0].axis is Axis.FIXED and len(entry.shape) == 1:
            return Piece(entry, range(1), range(entry.shape[0]))
        *rows, columns = part.spans(spans)
        height = entry.shape[-2] if rows else 1
        first = expert * height if stacked else 0
        span = rows[0] if rows else range(1)
        return Piece(entry, range(first + span.start, first + span.stop), columns)

    def _name(self, expert: int, matrix: Matrix, kind: str) -> str:
        scheme = self.layer.scheme
        assert scheme is not None
        return f"tensor {self.layer.name}.{scheme.tail(expert, matrix.name, kind)}"

    def _check_values(self, name: str, matrix: Matrix, found: dict[str, torch.Tensor], rows: range) -> None:
        """The row groups must be the plain ones, and the stored sizes those of the other tensors."""
        index, sizes = kind_of(self.form.index), kind_of(self.form.sizes)
        if index in found and not torch.equal(
            found[index].flatten(), torch.tensor(rows, dtype=found[index].dtype) // matrix.group
        ):
            raise CheckpointError(
                f"{name}{index}: rows are permuted among the groups (act-order); accepted is row // {matrix.group}"
            )
        if sizes in found and found[sizes].flatten()[-2:].tolist() != [matrix.width, matrix.k]:
            stored = found[sizes].flatten().tolist()
            raise CheckpointError(f"{name}{sizes}: {stored}; the other tensors are of {[matrix.width, matrix.k]}")

    def _take_scales(self, name: str, found: dict[str, torch.Tensor], part: MatrixPart) -> None:
        """Put FP16 scales, each of them looked at, in the place of the stored ones."""
        kind, spans = self.form.scales.kind, part.spans
        stored = turned(self.form.scales, found[kind])
        scales, vanished = half(name + kind, stored, spans[Axis.GROUP].start, spans[Axis.N].start)
        found[kind] = turned(self.form.scales, scales)
        if vanished:
            self.vanished.append((name + kind, vanished))  # by any of several threads: appending is whole

    def _check_zeros(self, name: str, zeros: torch.Tensor) -> None:
        """A symmetric file whose zeros are all off by one is read by the wrong one of two conventions."""
        if self.form.zeros_always and self.layer.quantization.zero_point is False:
            first = int(zeros[0, 0])
            if first in MISLABELLED and bool((zeros == first).all()):
                raise CheckpointError(
                    f"{name}{self.form.zeros.kind}: every zero is {first} under checkpoint_format "
                    f"{self.form.packing}; a symmetric file has 8, so this one follows the other convention"
                )


def kind_of(part: Part | None) -> str:
    return part.kind if part else ""


def matrices(layer: CheckpointLayer, sizes: Iterable[tuple[str, int, int, int]]) -> dict[str, Matrix]:
    """Where gate, up and down stand; `sizes` has name, K, N and rows per group of each."""
    scheme = layer.scheme
    assert scheme is not None
    found = {}
    for name, k, n, group in sizes:
        fused = scheme.fused and name != "down"
        found[name] = Matrix(scheme.name(name), k, n, group, n if fused and name == "up" else 0, 2 * n if fused else n)
    return found
