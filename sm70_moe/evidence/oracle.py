"""The FP64 reference of a checkpoint's layer: whole matrices, read as they lie in the files.

Only the headers, the names and the declared format are shared with the code that is judged: words
are read with numpy and unpacked here, one function for each format, and a rank's share is cut out
after decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70_moe.checkpoint.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.checkpoint.headers import TensorEntry
from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.reference.arithmetic import AwqExpert, CodedMatrix, Matrix, Reference, nibbles

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has none: bits for now
}
SYMMETRIC_ZERO = 8


def reference_of(checkpoint: Checkpoint, layer: CheckpointLayer, facts: LayerFacts) -> Reference:
    """The reference of one rank's share; experts are read when they are needed.

    Ids are those of this rank: with expert parallelism 0 is the rank's first expert.
    """
    per_rank, rank = facts.intermediate_per_rank, facts.tensor_rank or 0
    if per_rank is None or layer.scheme is None or facts.experts is None:
        raise CheckpointError(f"{layer.name}: the share of rank {rank} is not a whole number of columns")
    share, rest = divmod(facts.experts, facts.expert_parallel or 1)
    ranked = facts.expert_rank or 0
    first = ranked * share + min(ranked, rest)

    def read(expert: int) -> AwqExpert:
        return AwqExpert(*(matrix(checkpoint, layer, first + expert, name) for name in ("gate", "up", "down")))

    return Reference(read, share + (ranked < rest), slice(rank * per_rank, (rank + 1) * per_rank))


def matrix(checkpoint: Checkpoint, layer: CheckpointLayer, expert: int, name: str) -> Matrix:
    """One whole matrix, "gate", "up" or "down", in whatever format the layer is."""
    scheme, quantization = layer.scheme, layer.quantization
    unpack = UNPACK.get((quantization.format, quantization.packing))
    if scheme is None or unpack is None:
        raise CheckpointError(f"{layer.name}: no reference for {quantization.format} ({quantization.packing})")
    stored: dict[str, Array] = {}
    for kind in KINDS:
        entry = layer.entry(expert, scheme.name(name), kind)
        if entry is not None:
            whole = array(checkpoint, entry)
            stored[kind] = whole[expert] if scheme.stacked else whole
    found = unpack(stored, quantization.group or -1)
    if scheme.fused and name != "down":
        half = found.codes.shape[1] // 2
        columns = slice(half) if name == "gate" else slice(half, None)
        found = CodedMatrix(found.codes[:, columns], found.zeros[:, columns], found.scales[:, columns], found.groups)
    return found


KINDS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx")


def awq(stored: Mapping[str, Array], rows: int) -> CodedMatrix:
    """AWQ gemm: words (K, N/8) in CONTRACT 6's order, zeros alike."""
    every = slice(None)
    scales, zeros = stored["scales"], stored.get("qzeros")
    return coded(nibbles(stored["qweight"], every), None if zeros is None else nibbles(zeros, every), scales, rows)


def gptq_v1(stored: Mapping[str, Array], rows: int) -> CodedMatrix:
    """GPTQ with zeros - 1 in the word: one is added from column to column, as on paper, with a carry."""
    digits = straight(stored["qzeros"]).reshape(*stored["qzeros"].shape, 8).astype(np.int64)
    carry = np.zeros(digits.shape[:-1], np.int64)
    for column in range(8):
        total = digits[..., column] + 1 + carry
        digits[..., column], carry = total % 16, total // 16
    return gptq(stored, digits.reshape(len(digits), -1), rows)


def gptq_v2(stored: Mapping[str, Array], rows: int) -> CodedMatrix:
    """GPTQ with zeros as they are."""
    return gptq(stored, straight(stored["qzeros"]), rows)


def gptq(stored: Mapping[str, Array], zeros: Array, rows: int) -> CodedMatrix:
    """GPTQ: words (K/8, N) hold eight rows of one column each."""
    codes = straight(stored["qweight"].T).T
    return coded(codes, zeros, stored["scales"], rows, stored.get("g_idx"))


def compressed(stored: Mapping[str, Array], rows: int) -> CodedMatrix:
    """compressed-tensors: words (N, K/8), zeros (N/8, K/g), scales (N, K/g); nibbles are values + 8."""
    codes, zeros = straight(stored["weight_packed"]).T, stored.get("weight_zero_point")
    offset = None if zeros is None else straight(zeros.T)
    return coded(codes, offset, stored["weight_scale"].T, rows, stored.get("weight_g_idx"))


UNPACK: Mapping[tuple[str | None, str | None], Callable[[Mapping[str, Array], int], CodedMatrix]] = {
    ("awq", "gemm"): awq,
    ("gptq", "gptq"): gptq_v1,
    ("gptq", "gptq_v2"): gptq_v2,
    ("compressed-tensors", "pack-quantized"): compressed,
}


def coded(codes: Array, zeros: Array | None, scales: Array, rows: int, groups: Array | None = None) -> CodedMatrix:
    """With zeros of 8 where there are none, and plain groups of `rows` (-1: one) where the file does not say."""
    if zeros is None:
        zeros = np.full(scales.shape, SYMMETRIC_ZERO)
    if groups is None:
        groups = np.arange(len(codes)) // (len(codes) if rows == -1 else rows)
    return CodedMatrix(codes, zeros, scales, groups)


def straight(words: Array) -> Array:
    """The numbers of words (rows, W) as (rows, 8 W): the lowest four bits of a word come first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.stack((octets % 16, octets // 16), axis=-1).reshape(len(words), -1)


def array(checkpoint: Checkpoint, entry: TensorEntry) -> Array:
    """One whole tensor, read into memory of its own. BF16 comes as FP16."""
    path, start = checkpoint.headers.place(entry)
    dtype = DTYPES[entry.dtype]
    count = (entry.end - entry.start) // dtype.itemsize
    values: Array = np.fromfile(path, dtype, count, offset=start)
    if values.size != count:
        raise CheckpointError(f"{path}: {values.size} of {count} elements; changed since its header was read")
    if entry.dtype == "BF16":
        # BF16 is the upper half of FP32
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float16)
    return values.reshape(entry.shape)
