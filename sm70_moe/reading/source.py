"""Where a rank's codes come from: a checkpoint's files, or tensors that an engine has loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.checkpoint.names import MATRICES
from sm70_moe.checkpoint.provenance import layer_digest
from sm70_moe.checkpoint.shapes import whole
from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import matrix_group
from sm70_moe.numbers.codes import ExpertCodes
from sm70_moe.numbers.decoding import decode, decode_rows, turned
from sm70_moe.numbers.dense import require_dense
from sm70_moe.numbers.formats import AWQ, VALUES, Axis, Format, Part, Spans
from sm70_moe.numbers.rows import ExpertRows
from sm70_moe.numbers.scales import half, vanished_text
from sm70_moe.reading.pieces import fetch, opened
from sm70_moe.reading.reading import Decode, Form, MatrixPart, Reader, matrices
from sm70_moe.reading.shard import Share, covering_groups, source_groups
from sm70_moe.reading.transfer import brought


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

    def check(self) -> None:
        """Raise CheckpointError if one of the layer's files changed since its header was read."""
        self._reader.headers.check_all(sorted({entry.file for entry in self.layer.tails.values()}))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is worth saying of the values that were read so far."""
        return vanished_text(self._reader.vanished)

    def read(self, expert: int, group: int) -> ExpertCodes:
        """Codes of this rank's `expert` (0 is its first).

        Raises BackendError for a group or expert that does not fit, and CheckpointError naming the tensor for
        values that the format does not allow or that FP16 cannot hold.
        """
        return ExpertCodes(*self._three(expert, group, decode))

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        """What `read` gives, packed; raises the same."""
        return ExpertRows(*self._three(expert, group, decode_rows))

    def read_batch(self, experts: range, group: int) -> ExpertRows:
        """What `read_rows` gives for each of these experts, first dimension; raises the same."""
        numbers = self.share.experts[experts.start : experts.stop]
        with opened(self._reader.headers) as files:
            return ExpertRows(*(self._reader.batch(files, numbers, part, group) for part in self._parts))

    def read_columns(self, expert: int, group: int, inner: range, outer: range) -> ExpertCodes:
        """What `read` gives, of the columns `inner` of gate and up and `outer` of down; multiples of a word."""
        parts = [
            replace(part, columns=range(part.columns.start + span.start, part.columns.start + span.stop))
            for part, span in zip(self._parts, (inner, inner, outer), strict=True)
        ]
        return ExpertCodes(*self._each(parts, expert, group, decode))

    def fetch(self, expert: int) -> None:
        """Let the system read an expert's bytes ahead."""
        _require_expert(expert, self.experts)
        number, pieces = self.share.experts[expert], self._reader.pieces
        fetch(self._reader.headers, (piece for part in self._parts for piece in pieces(number, part).values()))

    def _three(self, expert: int, group: int, form: Decode[Form]) -> Iterator[Form]:
        return self._each(self._parts, expert, group, form)

    def _each(self, parts: Iterable[MatrixPart], expert: int, group: int, form: Decode[Form]) -> Iterator[Form]:
        _require_expert(expert, self.experts)
        with opened(self._reader.headers) as files:
            for part in parts:
                yield self._reader.matrix(files, self.share.experts[expert], part, group, form)


Stack = torch.Tensor | Sequence[torch.Tensor]
"""One tensor with the experts first, or one tensor per expert."""


@dataclass(slots=True, kw_only=True)
class TensorSource:
    """Words that an engine has already cut for this rank; a `WeightSource`.

    Shapes are those of `form` (`formats.FORMATS`), AWQ's unless told, for one matrix w13 of K = H
    rows and N = 2I columns, the gate's first, and one w2 of K = I and N = H; I is this rank's share.

    | per expert | AWQ | GPTQ, either version | compressed-tensors |
    |---|---|---|---|
    | w13_qweight INT32 | (H, 2I/8) | (H/8, 2I) | w13_weight_packed (2I, H/8) |
    | w13_qzeros INT32 | (H/g, 2I/8) | the same | w13_weight_zero_point (2I/8, H/g) |
    | w13_scales FP16 or BF16 | (H/g, 2I) | the same | w13_weight_scale (2I, H/g) |
    | w2_... | (I, H/8), (G, H/8), (G, H) | (I/8, H), ... | (H, I/8), (H/8, G), (H, G) |

    `of` takes them by the format's own names. Zeros that are None stand for 8. Row k must be in
    group k // g (no act-order). `group` is the checkpoint's, -1 for one group per column;
    `w2_offset` is how many rows of the first of the G groups belong to the rank before this one.
    `release` drops the tensors, so it is not frozen.
    """

    w13_qweight: Stack
    w13_qzeros: Stack | None
    w13_scales: Stack
    w2_qweight: Stack
    w2_qzeros: Stack | None
    w2_scales: Stack
    group: int
    w2_offset: int = 0
    form: Format = AWQ

    def __post_init__(self) -> None:
        """Raises BackendError for a group or an offset that no rank has, and for stacks that are not alike."""
        if self.group < 1 and self.group != -1:
            raise BackendError(f"group {self.group}; accepted is a positive number of rows, or -1")
        if self.w2_offset < 0 or 0 < self.group <= self.w2_offset:
            last = "or more" if self.group == -1 else f"to {self.group - 1}, rows within a group of {self.group}"
            raise BackendError(f"w2_offset {self.w2_offset}; accepted is 0 {last}")
        for matrix in ("w13", "w2"):
            for part, stack in self._stacks(matrix):
                if isinstance(stack, torch.Tensor):
                    require_dense({f"{matrix}_{part.kind}": stack})
                if stack is not None and len(stack) != self.experts:
                    raise BackendError(
                        f"{matrix}_{part.kind}: {len(stack)} experts; accepted are {self.experts}, as in "
                        f"w13_{self.form.codes.kind}"
                    )

    @classmethod
    def of(cls, form: Format, tensors: Mapping[str, Stack | None], *, group: int, w2_offset: int = 0) -> TensorSource:
        """From tensors by the names that the format has for them: "w13_weight_packed", "w2_qzeros", ...

        Zeros may be missing or None. Raises BackendError for another name and for one that is missing.
        """
        kinds = (form.codes.kind, form.zeros.kind, form.scales.kind)
        names = [f"{matrix}_{kind}" for matrix in ("w13", "w2") for kind in kinds]
        wrong = [name for name in tensors if name not in names]
        wrong += [name for name in names if tensors.get(name) is None and not name.endswith(form.zeros.kind)]
        if wrong:
            raise BackendError(f"{form.name} tensor {wrong[0]} is unknown or missing; accepted are {', '.join(names)}")
        given = dict(zip(AWQ_NAMES, map(tensors.get, names), strict=True))
        return cls(**given, group=group, w2_offset=w2_offset, form=form)  # type: ignore[arg-type]  # seen above

    @property
    def experts(self) -> int:
        return len(self.w13_qweight)

    def read(self, expert: int, group: int) -> ExpertCodes:
        """Codes of one expert; raises BackendError for a group or expert that does not fit or tensors
        that were released, CheckpointError for a shape or dtype that does not agree with the others.
        """
        return ExpertCodes(*self._three(expert, group, decode))

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        """What `read` gives, packed; raises the same."""
        return ExpertRows(*self._three(expert, group, decode_rows))

    def read_columns(self, expert: int, group: int, inner: range, outer: range) -> ExpertCodes:
        """What `read` gives, of the columns `inner` of gate and up and `outer` of down; multiples of a word.

        On the host: they are few, and each operation on a device costs more than one on them.
        """
        return ExpertCodes(*self._three(expert, group, decode, (inner, outer)))

    def release(self) -> None:
        """Drop the tensors: their memory is free if nobody else holds them."""
        self.w13_qweight = self.w13_scales = self.w2_qweight = self.w2_scales = ()
        self.w13_qzeros = self.w2_qzeros = None

    def _stacks(self, matrix: str) -> tuple[tuple[Part, Stack | None], ...]:
        form = self.form
        kinds = ((form.codes, "qweight"), (form.zeros, "qzeros"), (form.scales, "scales"))
        return tuple((part, getattr(self, f"{matrix}_{name}")) for part, name in kinds)

    def _three(
        self, expert: int, group: int, decode: Decode[Form], columns: tuple[range, range] | None = None
    ) -> tuple[Form, Form, Form]:
        """Gate, up and down; with `columns` those of gate and up, and those of down, brought to the host."""
        if not self.experts:
            raise BackendError("the weights were released once their banks were complete, or there were none")
        _require_expert(expert, self.experts)
        hidden, inner = self._rows("w13", expert), self._rows("w2", expert)
        for name, size in (("w13", hidden), ("w2", inner)):
            _require_words(name, range(size))
        # one group per column goes on to the rank's last row, wherever it began
        upper, lower = matrix_group(self.group, hidden), matrix_group(self.group, self.w2_offset + inner)
        if hidden % upper:
            raise BackendError(f"w13: {hidden} rows; accepted is a multiple of the group, {self.group}")
        covered = covering_groups(self.w2_offset, inner, lower)
        outer = whole(hidden, 2 * inner, upper)
        w13 = self._checked("w13", expert, outer)
        lower_spans = {Axis.K: range(inner), Axis.N: range(hidden), Axis.GROUP: covered}
        w2 = self._checked("w2", expert, lower_spans)
        left, right = columns or (range(inner), range(hidden))
        sides = (left, range(inner + left.start, inner + left.stop))
        cuts = [(w13, {**outer, Axis.N: side}) for side in sides] + [(w2, {**lower_spans, Axis.N: right})]
        parts = [{kind: self._cut(kind, t, spans) for kind, t in matrix.items()} for matrix, spans in cuts]
        if columns is not None:
            found = iter(brought(tensor for part in parts for tensor in part.values()))
            parts = [{kind: next(found) for kind in part} for part in parts]
        above, below = source_groups(0, hidden, upper, group), source_groups(self.w2_offset, inner, lower, group)
        gate, up = (decode(self.form, part, above, "w13_") for part in parts[:2])
        return gate, up, decode(self.form, parts[2], below, "w2_")

    def _rows(self, matrix: str, expert: int) -> int:
        """K of a matrix by its codes."""
        part, stack = self._stacks(matrix)[0]
        assert stack is not None
        words = stack[expert]
        require_dense({f"{matrix}_{part.kind} of expert {expert}": words})
        if words.dim() != len(part.dims) or not words.numel():
            raise CheckpointError(
                f"{matrix}_{part.kind}: {list(words.shape)}; accepted are {len(part.dims)} dimensions for each expert, "
                "of at least 1"
            )
        return next(size * dim.each for size, dim in zip(words.shape, part.dims, strict=True) if dim.axis is Axis.K)

    def _checked(self, matrix: str, expert: int, spans: Spans) -> dict[str, torch.Tensor]:
        """An expert's tensors of a matrix by kind, each of the shape that these sizes need."""
        found = {part: stack[expert] for part, stack in self._stacks(matrix) if stack is not None}
        for part, tensor in found.items():
            require_dense({f"{matrix}_{part.kind} of expert {expert}": tensor})
            _require_shape(f"{matrix}_{part.kind}", tensor, part.shape(spans))
        kinds = {part.kind: tensor for part, tensor in found.items()}
        scales = self.form.scales
        taken, _ = half(f"{matrix}_{scales.kind} of expert {expert}", turned(scales, kinds[scales.kind]))
        return {**kinds, scales.kind: turned(scales, taken)}

    def _cut(self, kind: str, tensor: torch.Tensor, spans: Spans) -> torch.Tensor:
        part = next(part for part in self.form.all if part.kind == kind)
        return tensor[tuple(slice(span.start, span.stop) for span in part.spans(spans))]


AWQ_NAMES = ("w13_qweight", "w13_qzeros", "w13_scales", "w2_qweight", "w2_qzeros", "w2_scales")


def _require_expert(expert: int, experts: int) -> None:
    if not 0 <= expert < experts:
        raise BackendError(f"expert {expert}; accepted are 0 to {experts - 1}")


def _require_words(name: str, columns: range) -> None:
    """A rank's columns must begin and end at a word."""
    if columns.start % VALUES or columns.stop % VALUES:
        raise BackendError(
            f"{name}: columns {columns.start} to {columns.stop} cut a word; accepted are multiples of {VALUES}"
        )


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name}: shape {list(tensor.shape)} of an expert; accepted is {list(shape)}")
