"""What of a layer an engine's loader has brought: each tensor whole, in its declared shape, or an error (R17).

Hosts let a tensor be missing or too short and go on with what memory held before. `Arrivals` looks
at every tensor of a layer before it is copied, cuts this rank's part, and in the end names what
never came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from sm70_moe.checkpoint.names import MATRICES
from sm70_moe.checkpoint.shapes import whole
from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import matrix_group
from sm70_moe.numbers.codes import Codes, ExpertCodes
from sm70_moe.numbers.decoding import DTYPES, decode, turned
from sm70_moe.numbers.formats import Axis, Format, Part, Spans, find
from sm70_moe.numbers.scales import half, vanished_text
from sm70_moe.reading.reading import MISLABELLED
from sm70_moe.reading.shard import Share, covering_groups, source_groups

SHOWN = 4
"""Missing tensors that an error names."""

Stacks = Mapping[tuple[str, str], torch.Tensor]
"""(matrix, kind of tensor) -> this rank's parts, experts first: ("gate", "qweight") -> (experts, ...)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Shapes of a layer's tensors, of the whole matrices and of one rank's part of them.

    Matrices are "gate", "up" and "down"; one with K rows and N columns is stored as the tensors
    that `form` lists.
    """

    form: Format
    share: Share
    group: int
    intermediate: int

    @classmethod
    def of(cls, facts: LayerFacts) -> Parts:
        """Raises BackendError for facts without sizes, CheckpointError for a format that cannot be read."""
        form = find(facts.format, facts.packing)
        if form is None or facts.checkpoint_group is None:
            raise CheckpointError(f"{facts.layer}: format {facts.format} ({facts.packing}) cannot be read")
        share = Share.of(facts)
        assert facts.intermediate is not None  # `Share.of` has seen it
        return cls(form, share, facts.checkpoint_group, facts.intermediate)

    def whole(self, matrix: str) -> Spans:
        """All rows, groups and columns of a matrix."""
        outer, inner = self.share.hidden, self.intermediate
        return whole(inner, outer, self.group) if matrix == "down" else whole(outer, inner, self.group)

    def own(self, matrix: str) -> Spans:
        """The rank's; groups that its rows of W2 only touch are among them."""
        outer, inner = range(self.share.hidden), self.share.intermediate
        rows, columns = (inner, outer) if matrix == "down" else (outer, inner)
        return {Axis.K: rows, Axis.N: columns, Axis.GROUP: covering_groups(rows.start, len(rows), self.rows(matrix))}

    def rows(self, matrix: str) -> int:
        """Rows of one group."""
        return matrix_group(self.group, self.intermediate if matrix == "down" else self.share.hidden)

    def stored(self, part: Part) -> bool:
        """Is it kept until the banks are made? Row groups and sizes are only looked at."""
        return part in (self.form.codes, self.form.zeros, self.form.scales)


class Arrivals:
    """Checks a layer's tensors one by one, and remembers which have come.

    `names` are the checkpoint's names of the matrices, `facts` say what the layer is. The caller
    keeps what `take` returns and hands it to `ArrivedSource`. `vanished` are the tensors with scales
    that became 0, no weight changed, and how many of them did.
    """

    def __init__(self, facts: LayerFacts, names: Mapping[str, str]) -> None:
        self.layer, self.names = facts.layer, dict(names)
        self.parts = Parts.of(facts)
        self.zero_point = facts.zero_point
        self._kinds = {part.kind: part for part in self.parts.form.all}
        # once and not for each of a model's 200,000 tensors
        self._own = {matrix: self.parts.own(matrix) for matrix in MATRICES}
        self._whole = {matrix: self.parts.whole(matrix) for matrix in MATRICES}
        self.vanished: list[tuple[str, int]] = []
        self._come: set[tuple[int, str, str]] = set()

    def take(self, expert: int, matrix: str, kind: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Check one whole tensor of an expert of the layer, and cut this rank's part out of it.

        Scales become FP16. None for an expert of another rank. Raises CheckpointError, naming the
        tensor, for a dtype, shape or row group that the format does not have, and for a second one.
        """
        local, part, name = self.parts.share.local_id(expert), self._kinds[kind], self.name(expert, matrix, kind)
        if local < 0:
            return None
        self._check(name, part, matrix, tensor)
        if (local, matrix, kind) in self._come:
            raise CheckpointError(f"tensor {name} came twice; accepted is once")
        self._come.add((local, matrix, kind))
        cut = tensor[tuple(slice(s.start, s.stop) for s in part.spans(self._own[matrix]))]
        return self._scales(name, cut, self._own[matrix]) if part is self.parts.form.scales else cut

    def _scales(self, name: str, stored: torch.Tensor, spans: Spans) -> torch.Tensor:
        part = self.parts.form.scales
        found, vanished = half(f"tensor {name}", turned(part, stored), spans[Axis.GROUP].start, spans[Axis.N].start)
        if vanished:
            self.vanished.append((f"tensor {name}", vanished))
        return turned(part, found)

    def name(self, expert: int, matrix: str, kind: str) -> str:
        return f"{self.layer}.{expert}.{self.names[matrix]}.{kind}"

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of tensors of which any has come."""
        return frozenset(kind for _, _, kind in self._come)

    def missing(self) -> Iterator[str]:
        """Names of what should have come, given what has: expert by expert."""
        wanted = self.parts.form.parts(self.kinds, self.zero_point)
        for local, expert in enumerate(self.parts.share.experts):
            for matrix in MATRICES:
                for part in wanted:
                    if (local, matrix, part.kind) not in self._come:
                        yield self.name(expert, matrix, part.kind)

    def require_complete(self) -> None:
        """Raise CheckpointError that names the first tensors that never came, and counts them."""
        missing = list(self.missing())
        if missing:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise CheckpointError(
                f"{self.layer}: {len(missing)} tensors did not come from the checkpoint: "
                f"{', '.join(missing[:SHOWN])}{more}"
            )

    def _check(self, name: str, part: Part, matrix: str, tensor: torch.Tensor) -> None:
        spans = self._whole[matrix]
        shape, dtypes = part.shape(spans), [DTYPES[dtype] for dtype in part.dtypes]
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
            accepted = " or ".join(map(str, dtypes))
            raise CheckpointError(
                f"tensor {name}: {tensor.dtype} {list(tensor.shape)}; accepted is {accepted} {list(shape)}"
            )
        rows, columns = spans[Axis.K], spans[Axis.N]
        if part is self.parts.form.index and tensor.tolist() != [r // self.parts.rows(matrix) for r in rows]:
            raise CheckpointError(
                f"tensor {name}: rows are permuted among the groups (act-order); accepted is row // "
                f"{self.parts.rows(matrix)}"
            )
        if part is self.parts.form.sizes and tensor.tolist() != [len(columns), len(rows)]:
            raise CheckpointError(f"tensor {name}: {tensor.tolist()}; accepted is {[len(columns), len(rows)]}")


@dataclass(frozen=True, slots=True)
class ArrivedSource:
    """Tensors that have arrived, cut for this rank, in any format; a `WeightSource`.

    `stacks` hold codes, scales and, unless the file is symmetric and has none, zeros.
    """

    arrivals: Arrivals
    stacks: Stacks

    @property
    def experts(self) -> int:
        return len(self.arrivals.parts.share.experts)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is worth saying of the values that came."""
        return vanished_text(self.arrivals.vanished)

    def read(self, expert: int, group: int) -> ExpertCodes:
        """Codes of this rank's `expert`; raises BackendError for a group that does not fit."""
        if not 0 <= expert < self.experts:
            raise BackendError(f"expert {expert}; accepted are 0 to {self.experts - 1}")
        return ExpertCodes(*(self._matrix(expert, matrix, group) for matrix in MATRICES))

    def _matrix(self, expert: int, matrix: str, group: int) -> Codes:
        parts, name = self.arrivals.parts, self.arrivals.name(self.arrivals.parts.share.experts[expert], matrix, "")
        rows = parts.own(matrix)[Axis.K]
        groups = source_groups(rows.start, len(rows), parts.rows(matrix), group)
        first = covering_groups(rows.start, len(rows), parts.rows(matrix)).start
        found = {kind: stack[expert] for (of, kind), stack in self.stacks.items() if of == matrix}
        codes = decode(parts.form, found, tuple(number - first for number in groups), name)
        self._check_zeros(name, codes.zeros)
        return codes

    def _check_zeros(self, name: str, zeros: torch.Tensor) -> None:
        """A symmetric file whose zeros are all off by one follows the other of two conventions (FORMATS 5)."""
        form = self.arrivals.parts.form
        if not form.zeros_always or self.arrivals.zero_point is not False:
            return
        first = int(zeros[0, 0])
        if first in MISLABELLED and bool((zeros == first).all()):
            raise CheckpointError(
                f"tensor {name}{form.zeros.kind}: every zero is {first} under checkpoint_format {form.packing}; "
                "a symmetric file has 8, so this one follows the other convention"
            )
