"""Where a rank's codes come from: a checkpoint's files, or tensors that an engine has loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import matrix_group
from sm70_moe.weights.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.weights.codes import ExpertCodes
from sm70_moe.weights.decoding import decode, decode_rows
from sm70_moe.weights.formats import AWQ, VALUES
from sm70_moe.weights.names import MATRICES
from sm70_moe.weights.pieces import fetch, opened
from sm70_moe.weights.provenance import layer_digest
from sm70_moe.weights.reading import Decode, Form, MatrixPart, Reader, matrices
from sm70_moe.weights.rows import ExpertRows
from sm70_moe.weights.shard import Share, covering_groups, source_groups


class CheckpointSource:
    """One rank's share of one layer, read from the files when asked for; a `WeightSource`.

    Any format of `formats.FORMATS`, experts by themselves or stacked. Reads only the bytes of the
    rank's rows and columns (the operating system rounds up to pages). Keeps no file open and no
    tensor alive between reads, so any number of threads may read.
    """

    def __init__(self, checkpoint: Checkpoint, layer: CheckpointLayer, facts: LayerFacts) -> None:
        """Check every tensor of the layer; `facts` are the layer's, with this rank's numbers.

        Raises CheckpointError for a layer that `Checkpoint.check` refuses, BackendError for ranks
        that do not divide it.
        """
        geometry = checkpoint.check(layer)
        group = layer.quantization.group
        assert group is not None  # `check` has seen it
        if layer.scheme is None or not layer.scheme.gated:
            raise CheckpointError(f"{layer.name}: experts without a gate; accepted are gate, up and down")
        self.layer = layer
        self.share = Share.of(facts)
        if (facts.hidden, facts.intermediate, facts.experts) != (
            geometry.hidden, geometry.intermediate, layer.experts
        ):  # fmt: skip
            raise BackendError(f"{layer.name}: the facts belong to another layer, {facts.layer}")
        _require_words(layer.name, self.share.intermediate)
        self._reader = Reader(checkpoint.headers, layer)
        sizes = ((name, *geometry.matrix(name)) for name in MATRICES)
        found = matrices(layer, ((name, k, n, matrix_group(group, k)) for name, k, n in sizes))
        inner, outer = self.share.intermediate, range(self.share.hidden)
        spans = {"gate": (outer, inner), "up": (outer, inner), "down": (inner, outer)}
        self._parts = tuple(MatrixPart(found[name], *spans[name]) for name in MATRICES)

    @property
    def experts(self) -> int:
        return len(self.share.experts)

    @property
    def digest(self) -> str:
        """Differs for other weights; see `provenance.layer_digest` for what is trusted."""
        layer = self.layer
        return layer_digest(self._reader.headers, layer.name, layer.tails, repr(layer.quantization))

    def read(self, expert: int, group: int) -> ExpertCodes:
        """Codes of this rank's `expert` (0 is its first).

        Raises BackendError for a group that does not fit, and CheckpointError naming the tensor for
        values that the format does not allow or that FP16 cannot hold.
        """
        return ExpertCodes(*self._three(expert, group, decode))

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        """What `read` gives, packed; raises the same."""
        return ExpertRows(*self._three(expert, group, decode_rows))

    def fetch(self, expert: int) -> None:
        """Let the system read an expert's bytes ahead."""
        number, pieces = self.share.experts[expert], self._reader.pieces
        fetch(self._reader.headers, (piece for part in self._parts for piece in pieces(number, part).values()))

    def _three(self, expert: int, group: int, form: Decode[Form]) -> Iterator[Form]:
        with opened(self._reader.headers) as files:
            for part in self._parts:
                yield self._reader.matrix(files, self.share.experts[expert], part, group, form)


Stack = torch.Tensor | Sequence[torch.Tensor]
"""One tensor with the experts first, or one tensor per expert."""


@dataclass(slots=True, kw_only=True)
class TensorSource:
    """AWQ words that an engine has already cut for this rank; a `WeightSource`.

    Per expert, with I this rank's share: w13_qweight INT32 (H, 2I/8) with the gate's columns
    first, w13_qzeros INT32 (H/g, 2I/8), w13_scales FP16 (H/g, 2I), w2_qweight INT32 (I, H/8),
    w2_qzeros INT32 (G, H/8), w2_scales FP16 (G, H). Zeros that are None stand for 8. `group` is
    the checkpoint's; `w2_offset` is how many rows of the first of the G groups belong to the rank
    before this one. `release` drops the tensors, so it is not frozen.
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
        """Codes of one expert; raises BackendError for a group that does not fit or tensors that were
        released, CheckpointError for a shape or dtype that does not agree with the others.
        """
        return ExpertCodes(*self._three(expert, group, decode))

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        """What `read` gives, packed; raises the same."""
        return ExpertRows(*self._three(expert, group, decode_rows))

    def release(self) -> None:
        """Drop the tensors: their memory is free if nobody else holds them."""
        self.w13_qweight = self.w13_scales = self.w2_qweight = self.w2_scales = ()
        self.w13_qzeros = self.w2_qzeros = None

    def _three(self, expert: int, group: int, form: Decode[Form]) -> tuple[Form, Form, Form]:
        if not self.experts:
            raise BackendError("the weights were released once their banks were complete, or there were none")
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

        def part(
            name: str, words: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, groups: tuple[int, ...]
        ) -> Form:
            given = {AWQ.codes.kind: words, AWQ.scales.kind: scales}
            return form(AWQ, given if zeros is None else {**given, AWQ.zeros.kind: zeros}, groups, name)

        def half(start: int) -> Form:
            packed = slice(start // VALUES, (start + inner) // VALUES)
            cut = None if zeros is None else zeros[:, packed]
            return part("w13_", words[:, packed], cut, scales[:, start : start + inner], groups)

        w2_groups = source_groups(self.w2_offset, inner, lower, group)
        return half(0), half(inner), part("w2_", down, w2_zeros, w2_scales, w2_groups)


def _require_words(name: str, columns: range) -> None:
    """A rank's columns must begin and end at a word."""
    if columns.start % VALUES or columns.stop % VALUES:
        raise BackendError(
            f"{name}: columns {columns.start} to {columns.stop} cut a word; accepted are multiples of {VALUES}"
        )


def _require_shape(name: str, tensor: torch.Tensor | None, *shape: int) -> None:
    if tensor is not None and tensor.shape != shape:
        raise CheckpointError(f"{name}: shape {list(tensor.shape)} of an expert; accepted is {list(shape)}")
