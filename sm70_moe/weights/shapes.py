"""Which dtype and shape every tensor of an AWQ layer must have, and what shapes say of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from sm70_moe.errors import CheckpointError
from sm70_moe.grouping import matrix_group
from sm70_moe.weights.headers import TensorEntry
from sm70_moe.weights.names import MATRICES, Scheme, Tails
from sm70_moe.weights.quantization import Quantization

WORD_BITS = 32

QWEIGHT, QZEROS, SCALES, WEIGHT = "qweight", "qzeros", "scales", "weight"


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


def is_awq_gemm(quantization: Quantization) -> bool:
    """Whether the words are packed along N, as CONTRACT 6 describes."""
    return quantization.format == "awq" and quantization.packing == "gemm"


def measure(layer: str, tails: Tails, scheme: Scheme, quantization: Quantization) -> Geometry | None:
    """Geometry by the tensors of the first expert; None for formats whose shapes say nothing here.

    N comes from the scales, because they are not packed and so do not depend on the bits.
    """
    gate = f"0.{scheme.gate}"
    if is_awq_gemm(quantization):
        rows, _ = _matrix(layer, tails, f"{gate}.{QWEIGHT}")
        _, columns = _matrix(layer, tails, f"{gate}.{SCALES}")
        return Geometry(rows, columns)
    if quantization.format == "none":
        columns, rows = _matrix(layer, tails, f"{gate}.{WEIGHT}")
        return Geometry(rows, columns)
    return None


def _matrix(layer: str, tails: Tails, tail: str) -> tuple[int, int]:
    shape = tails[tail].shape
    if len(shape) != 2:
        raise CheckpointError(f"tensor {layer}.{tail}: shape {list(shape)}; accepted are two dimensions")
    return shape[0], shape[1]


def kinds(quantization: Quantization, present: frozenset[str]) -> tuple[str, ...]:
    """Kinds of tensors that every matrix needs.

    A symmetric checkpoint may store its zeros, all 8, or leave them out (FORMATS 3).
    """
    if quantization.format == "none":
        return (WEIGHT,)
    if not is_awq_gemm(quantization):
        return ()
    if quantization.zero_point is False and QZEROS not in present:
        return QWEIGHT, SCALES
    return QWEIGHT, QZEROS, SCALES


def expected(
    geometry: Geometry, quantization: Quantization, present: tuple[str, ...]
) -> Iterator[tuple[str, str, str, tuple[int, int]]]:
    """(matrix, kind, dtype, shape) of every tensor of one expert. Bits and group must be known."""
    assert quantization.bits is not None
    assert quantization.group is not None
    for matrix in MATRICES:
        k, n = geometry.matrix(matrix)
        words = n * quantization.bits // WORD_BITS
        groups = k // matrix_group(quantization.group, k)
        shapes = {QWEIGHT: ("I32", (k, words)), QZEROS: ("I32", (groups, words)), SCALES: ("F16", (groups, n))}
        for kind in present:
            yield matrix, kind, *shapes[kind]


def check_groups(layer: str, tails: Tails, scheme: Scheme, geometry: Geometry, group: int | None) -> None:
    """Check that the first expert's scales have K / g rows.

    A group that does not divide K is left to admission, which refuses it with the numbers.
    """
    for matrix, name in zip(MATRICES, scheme.matrices, strict=True):
        k, _ = geometry.matrix(matrix)
        rows = None if not group else matrix_group(group, k)
        if rows is not None and rows > 0 and k % rows == 0:
            tail = f"0.{name}.{SCALES}"
            _check_rows(f"{layer}.{tail}", tails[tail], k, rows)


def _check_rows(name: str, entry: TensorEntry, k: int, group: int) -> None:
    if not entry.shape or entry.shape[0] != k // group:
        raise CheckpointError(
            f"tensor {name}: scales of shape {list(entry.shape)}; config.json says group {group}, "
            f"so K / g = {k} / {group} = {k // group} rows are accepted"
        )


def check_tensors(
    layer: str, tails: Tails, scheme: Scheme, geometry: Geometry, quantization: Quantization, experts: int
) -> None:
    """Compare dtype and shape of every tensor of every expert with what they must be."""
    names = dict(zip(MATRICES, scheme.matrices, strict=True))
    present = kinds(quantization, frozenset((QZEROS,) if f"0.{scheme.gate}.{QZEROS}" in tails else ()))
    wanted = [
        (f".{names[matrix]}.{kind}", dtype, shape)
        for matrix, kind, dtype, shape in expected(geometry, quantization, present)
    ]
    for suffix, dtype, shape in wanted:
        entries = [tails[f"{expert}{suffix}"] for expert in range(experts)]
        # one set for all experts: a loop over 200,000 tensors would take most of `explain`'s second
        if {*map(_form, entries)} != {(dtype, shape)}:
            expert, entry = next((n, e) for n, e in enumerate(entries) if _form(e) != (dtype, shape))
            raise CheckpointError(
                f"tensor {layer}.{expert}{suffix} in {entry.file}: {entry.dtype} {list(entry.shape)}; "
                f"accepted is {dtype} {list(shape)}"
            )


_form = attrgetter("dtype", "shape")
