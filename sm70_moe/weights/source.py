"""Where a rank's codes come from: a checkpoint's files, or tensors that an engine has loaded."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import matrix_group
from sm70_moe.weights.awq import decode
from sm70_moe.weights.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.weights.codes import Codes, ExpertCodes
from sm70_moe.weights.headers import Headers, TensorEntry
from sm70_moe.weights.shapes import QWEIGHT, QZEROS, SCALES
from sm70_moe.weights.shard import Share, covering_groups, source_groups
from sm70_moe.weights.words import VALUES

DTYPES = {"I32": torch.int32, "F16": torch.float16}


class CheckpointSource:
    """One rank's share of one AWQ layer, read from the files when asked for; a `WeightSource`.

    Reads only the bytes of the rank's rows and columns (the operating system rounds up to pages).
    Keeps no file open and no tensor alive between reads, so any number of threads may read.
    """

    def __init__(self, checkpoint: Checkpoint, layer: CheckpointLayer, facts: LayerFacts) -> None:
        """Check every tensor of the layer; `facts` are the layer's, with this rank's numbers.

        Raises CheckpointError for a layer that `Checkpoint.check` refuses, BackendError for ranks
        that do not divide it.
        """
        geometry = checkpoint.check(layer)
        assert layer.quantization.group is not None
        assert layer.scheme is not None
        self.layer = layer
        self.share = Share.of(facts)
        if (facts.hidden, facts.intermediate, facts.experts) != (
            geometry.hidden, geometry.intermediate, layer.experts
        ):  # fmt: skip
            raise BackendError(f"{layer.name}: the facts belong to another layer, {facts.layer}")
        self._headers = checkpoint.headers
        self._group = layer.quantization.group
        self._names = layer.scheme
        _require_words(layer.name, self.share.intermediate)

    @property
    def experts(self) -> int:
        return len(self.share.experts)

    def read(self, expert: int, group: int) -> ExpertCodes:
        """Codes of this rank's `expert` (0 is its first); raises BackendError for a group that does not fit."""
        number = self.share.experts[expert]
        inner, outer = self.share.intermediate, range(self.share.hidden)
        whole = matrix_group(self._group, self.share.hidden)
        return ExpertCodes(
            self._matrix(number, self._names.gate, outer, inner, whole, group),
            self._matrix(number, self._names.up, outer, inner, whole, group),
            self._matrix(number, self._names.down, inner, outer, self._down_group(), group),
        )

    def _down_group(self) -> int:
        if self._group != -1:
            return self._group
        entry = self.layer.entry(0, self._names.down, QWEIGHT)
        assert entry is not None
        return entry.shape[0]

    def _matrix(self, expert: int, matrix: str, rows: range, columns: range, source: int, group: int) -> Codes:
        groups = source_groups(rows.start, len(rows), source, group)
        cover = covering_groups(rows.start, len(rows), source)
        words = range(columns.start // VALUES, columns.stop // VALUES)
        zeros = self.layer.entry(expert, matrix, QZEROS)
        return decode(
            self._part(expert, matrix, QWEIGHT, rows, words),
            None if zeros is None else read_part(self._headers, zeros, cover, words),
            self._part(expert, matrix, SCALES, cover, columns),
            tuple(number - cover.start for number in groups),
        )

    def _part(self, expert: int, matrix: str, kind: str, rows: range, columns: range) -> torch.Tensor:
        entry = self.layer.entry(expert, matrix, kind)
        assert entry is not None  # `check` has seen it
        return read_part(self._headers, entry, rows, columns)


def read_part(headers: Headers, entry: TensorEntry, rows: range, columns: range) -> torch.Tensor:
    """Rows and columns of one INT32 or FP16 matrix of a checkpoint, as a tensor of its own.

    The file is mapped for this read only: a mapping that stays would keep every page that was
    touched in the process's resident memory, and a layer's files are larger than its banks.
    Raises CheckpointError if the file changed since its header was read.
    """
    dtype = DTYPES[entry.dtype]
    _, width = entry.shape
    path, start = headers.place(entry)
    first = start + rows.start * width * dtype.itemsize
    size = len(rows) * width * dtype.itemsize
    page = first - first % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            # a private copy-on-write mapping: torch wants writable memory, and nobody writes
            view = mmap.mmap(file.fileno(), first - page + size, offset=page, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: changed since its header was read: {error}") from error
    whole = torch.frombuffer(view, dtype=dtype, count=len(rows) * width, offset=first - page)
    # clone: a slice of whole rows would otherwise keep the mapping
    return whole.view(len(rows), width)[:, columns.start : columns.stop].clone(memory_format=torch.contiguous_format)


Stack = torch.Tensor | Sequence[torch.Tensor]
"""One tensor with the experts first, or one tensor per expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """AWQ words that an engine has already cut for this rank; a `WeightSource`.

    Per expert, with I this rank's share: w13_qweight INT32 (H, 2I/8) with the gate's columns
    first, w13_qzeros INT32 (H/g, 2I/8), w13_scales FP16 (H/g, 2I), w2_qweight INT32 (I, H/8),
    w2_qzeros INT32 (G, H/8), w2_scales FP16 (G, H). Zeros that are None stand for 8. `group` is
    the checkpoint's; `w2_offset` is how many rows of the first of the G groups belong to the rank
    before this one.
    """

    w13_qweight: Stack
    w13_qzeros: Stack | None
    w13_scales: Stack
    w2_qweight: Stack
    w2_qzeros: Stack | None
    w2_scales: Stack
    group: int
    w2_offset: int = 0

    @property
    def experts(self) -> int:
        return len(self.w13_qweight)

    def read(self, expert: int, group: int) -> ExpertCodes:
        """Codes of one expert; raises BackendError for a group that does not fit, CheckpointError for
        a shape or dtype that does not agree with the others.
        """
        words, down = self.w13_qweight[expert], self.w2_qweight[expert]
        hidden, inner = words.shape[0], down.shape[0]
        _require_words("w13_qweight", range(inner))
        zeros = None if self.w13_qzeros is None else self.w13_qzeros[expert]
        w2_zeros = None if self.w2_qzeros is None else self.w2_qzeros[expert]
        scales, w2_scales = self.w13_scales[expert], self.w2_scales[expert]
        upper, lower = matrix_group(self.group, hidden), matrix_group(self.group, inner)
        _require_shape("w13_qweight", words, hidden, 2 * inner // VALUES)
        _require_shape("w13_qzeros", zeros, hidden // upper, 2 * inner // VALUES)
        _require_shape("w13_scales", scales, hidden // upper, 2 * inner)
        covered = len(covering_groups(self.w2_offset, inner, lower))
        _require_shape("w2_qweight", down, inner, hidden // VALUES)
        _require_shape("w2_qzeros", w2_zeros, covered, hidden // VALUES)
        _require_shape("w2_scales", w2_scales, covered, hidden)
        groups = source_groups(0, hidden, upper, group)

        def half(start: int) -> Codes:
            packed = slice(start // VALUES, (start + inner) // VALUES)
            return decode(
                words[:, packed],
                None if zeros is None else zeros[:, packed],
                scales[:, start : start + inner],
                groups,
            )

        w2_groups = source_groups(self.w2_offset, inner, lower, group)
        return ExpertCodes(half(0), half(inner), decode(down, w2_zeros, w2_scales, w2_groups))


def _require_words(name: str, columns: range) -> None:
    """A rank's columns must begin and end at a word."""
    if columns.start % VALUES or columns.stop % VALUES:
        raise BackendError(
            f"{name}: columns {columns.start} to {columns.stop} cut a word; accepted are multiples of {VALUES}"
        )


def _require_shape(name: str, tensor: torch.Tensor | None, *shape: int) -> None:
    if tensor is not None and tensor.shape != shape:
        raise CheckpointError(f"{name}: shape {list(tensor.shape)} of an expert; accepted is {list(shape)}")
