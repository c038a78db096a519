"""Which dtype and shape every tensor of a layer must have, and what shapes say of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from sm70_moe.checkpoint.headers import TensorEntry
from sm70_moe.checkpoint.names import MATRICES, Scheme, Tails, tails_of
from sm70_moe.checkpoint.quantization import Quantization
from sm70_moe.errors import CheckpointError
from sm70_moe.grouping import matrix_group
from sm70_moe.numbers.formats import VALUES, WEIGHT, Axis, Dim, Format, Part, Spans, find

WORD_BITS = 32
WHOLE_BITS = (2, 4, 8)
"""Widths of which a word holds a whole number, so that words tell how many values there are."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one expert: gate and up are (hidden, intermediate), down (intermediate, hidden)."""

    hidden: int
    intermediate: int

    def matrix(self, name: str) -> tuple[int, int]:
        """K and N of "gate", "up" or "down"."""
        if name == "down":
            return self.intermediate, self.hidden
        return self.hidden, self.intermediate


def stored_matrices(scheme: Scheme, geometry: Geometry) -> Iterator[tuple[str, int, int]]:
    """(name, K, N) of each matrix that the scheme stores; one of gate and up together is twice as wide."""
    for matrix in MATRICES:
        name = scheme.name(matrix)
        if name and not (scheme.fused and matrix == "up"):
            k, n = geometry.matrix(matrix)
            yield name, k, 2 * n if scheme.fused and matrix == "gate" else n


def whole(k: int, n: int, group: int) -> Spans:
    """All of a matrix; `group` may be -1, and the last group shorter."""
    return {Axis.K: range(k), Axis.N: range(n), Axis.GROUP: range(-(-k // matrix_group(group, k)))}


def measure(layer: str, tails: Tails, scheme: Scheme, quantization: Quantization) -> Geometry | None:
    """Geometry by the tensors of the first expert; None for formats whose shapes say nothing here.

    N comes from the scales, because they are not packed and so do not depend on the bits.
    """
    form = find(quantization.format, quantization.packing)
    bits = quantization.bits
    up = f"{layer}.{scheme.tail(0, scheme.up, WEIGHT)}"
    if quantization.format == "none" and not scheme.stacked:
        columns, rows = _sizes(up, tails[scheme.tail(0, scheme.up, WEIGHT)], 2)
    # stacked plain weights stand with inputs or outputs first, depending on the model
    elif form is None or bits not in WHOLE_BITS:
        return None
    else:
        words, scales = (scheme.tail(0, scheme.up, part.kind) for part in (form.codes, form.scales))
        rows = _count(f"{layer}.{words}", tails[words], form.codes, Axis.K, bits, scheme.stacked)
        columns = _count(f"{layer}.{scales}", tails[scales], form.scales, Axis.N, bits, scheme.stacked)
    if scheme.fused and columns % 2:
        raise CheckpointError(f"{up}: {columns} columns; gate and up together have an even number")
    return Geometry(rows, columns // 2 if scheme.fused else columns)


def _count(name: str, entry: TensorEntry, part: Part, axis: Axis, bits: int, stacked: bool) -> int:
    """How many rows or columns the matrix has by this tensor."""
    sizes = _sizes(name, entry, len(part.dims) + stacked)[stacked:]
    size, dim = next((size, dim) for size, dim in zip(sizes, part.dims, strict=True) if dim.axis is axis)
    return size if dim.each == 1 else size * WORD_BITS // bits


def _sizes(name: str, entry: TensorEntry, dimensions: int) -> tuple[int, ...]:
    if len(entry.shape) != dimensions:
        raise CheckpointError(f"tensor {name}: shape {list(entry.shape)}; accepted are {dimensions} dimensions")
    if 0 in entry.shape:
        raise CheckpointError(f"tensor {name}: shape {list(entry.shape)}; accepted are sizes of at least 1")
    return entry.shape


def check_groups(layer: str, tails: Tails, scheme: Scheme, geometry: Geometry, form: Format, group: int | None) -> None:
    """Check that the first expert's scales have K / g groups, rounded up."""
    place = form.scales.dims.index(Dim(Axis.GROUP)) + scheme.stacked
    for name, k, _ in stored_matrices(scheme, geometry):
        rows = None if not group else matrix_group(group, k)
        if rows is None or rows < 1:
            continue
        tail = scheme.tail(0, name, form.scales.kind)
        shape = tails[tail].shape
        groups = -(-k // rows)
        if len(shape) <= place or shape[place] != groups:
            rounded = ", rounded up," if k % rows else ""
            raise CheckpointError(
                f"tensor {layer}.{tail}: scales of shape {list(shape)}; config.json says group {rows}, "
                f"so K / g = {k} / {rows} = {groups} groups{rounded} are accepted"
            )


def check_divides(layer: str, geometry: Geometry, group: int | None) -> None:
    """Check that groups and words divide both matrices."""
    if group is None or group == 0 or group < -1:
        raise CheckpointError(f"{layer}: group_size {group}; accepted is a positive number of rows, or -1")
    for k in (geometry.hidden, geometry.intermediate):
        rows = matrix_group(group, k)
        if k % rows:
            raise CheckpointError(
                f"{layer}: group_size {group} does not divide K = {k}: last group of {k % rows} rows; accepted are "
                "groups of one size"
            )
        if k % VALUES:
            raise CheckpointError(f"{layer}: {k} columns; accepted is a multiple of {VALUES}, the codes in a word")


def check_tensors(
    layer: str,
    tails: Tails,
    scheme: Scheme,
    geometry: Geometry,
    parts: tuple[Part, ...],
    group: int,
    experts: int,
) -> None:
    """Compare dtype and shape of every tensor of every expert with what they must be."""
    for name, k, n in stored_matrices(scheme, geometry):
        for part in parts:
            shapes = accepted_shapes(part, whole(k, n, group), experts if scheme.stacked else None)
            forms = {(dtype, shape) for dtype in part.dtypes for shape in shapes}
            _check_forms(layer, tails, tails_of(scheme, experts, name, part.kind), forms)


def accepted_shapes(part: Part, spans: Spans, experts: int | None) -> tuple[tuple[int, ...], ...]:
    """Shapes that the tensor of a matrix, or of `experts` stacked ones, may have."""
    shape = part.shape(spans)
    if experts is None:
        return (shape,)
    if part.dims[0].axis is Axis.FIXED:
        # sizes of the whole stack, or of each expert
        return (3,), (experts, *shape)
    return ((experts, *shape),)


def _check_forms(layer: str, tails: Tails, names: tuple[str, ...], forms: set[tuple[str, tuple[int, ...]]]) -> None:
    # one set for all experts: a loop over 200,000 tensors would take most of `explain`'s second
    if {*map(_form, map(tails.__getitem__, names))} <= forms:
        return
    name, entry = next((tail, tails[tail]) for tail in names if _form(tails[tail]) not in forms)
    accepted = " or ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(forms, key=str, reverse=True))
    raise CheckpointError(
        f"tensor {layer}.{name} in {entry.file}: {entry.dtype} {list(entry.shape)}; accepted is {accepted}"
    )


_form = attrgetter("dtype", "shape")
