"""The FP64 reference of a checkpoint's layer: whole matrices, read as they lie in the files.

Only the headers are shared with the code that is judged: words are read with numpy and unpacked by
the reference itself, and a rank's share is cut out after decoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.reference import AwqExpert, AwqMatrix, Reference
from sm70_moe.weights.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.weights.headers import TensorEntry

DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "F16": np.dtype("<f2")}
SYMMETRIC_ZERO_WORD = np.int32(-0x77777778)
"""Eight zeros of 8, 0x88888888: what a file without zeros means."""


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
    names = layer.scheme

    def read(expert: int) -> AwqExpert:
        number = first + expert
        return AwqExpert(*(matrix(checkpoint, layer, number, name) for name in (names.gate, names.up, names.down)))

    return Reference(read, share + (ranked < rest), slice(rank * per_rank, (rank + 1) * per_rank))


def matrix(checkpoint: Checkpoint, layer: CheckpointLayer, expert: int, name: str) -> AwqMatrix:
    """One whole AWQ matrix."""
    found: dict[str, NDArray[Any]] = {}
    for kind in ("qweight", "qzeros", "scales"):
        entry = layer.entry(expert, name, kind)
        if entry is not None:
            found[kind] = array(checkpoint, entry)
    qweight, scales = found["qweight"], found["scales"]
    zeros = found.get("qzeros")
    if zeros is None:
        zeros = np.full((scales.shape[0], qweight.shape[1]), SYMMETRIC_ZERO_WORD, np.int32)
    return AwqMatrix(qweight, zeros, scales, qweight.shape[0] // scales.shape[0])


def array(checkpoint: Checkpoint, entry: TensorEntry) -> NDArray[Any]:
    """One whole tensor, read into memory of its own."""
    path, start = checkpoint.headers.place(entry)
    dtype = DTYPES[entry.dtype]
    count = (entry.end - entry.start) // dtype.itemsize
    values: NDArray[Any] = np.fromfile(path, dtype, count, offset=start)
    if values.size != count:
        raise CheckpointError(f"{path}: {values.size} of {count} elements; changed since its header was read")
    return values.reshape(entry.shape)
