"""From banks back to a checkpoint's tensors, for `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.checkpoint.checkpoint import CheckpointLayer
from sm70_moe.checkpoint.names import SCHEMES, Scheme
from sm70_moe.errors import CheckpointError
from sm70_moe.grouping import matrix_group
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.decoding import encode
from sm70_moe.numbers.formats import Format, Part
from sm70_moe.numbers.rows import Rows
from sm70_moe.numbers.rowwords import unpack_rows


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint stores a layer: names, format, tensors of a matrix, and rows of a group (or -1).

    Stacked experts are written one by one: transformers would take stacks apart by rules that are
    for plain weights.
    """

    scheme: Scheme
    form: Format
    parts: tuple[Part, ...]
    group: int

    @classmethod
    def of(cls, layer: CheckpointLayer) -> Stored:
        """Of a layer that `Checkpoint.check` has accepted."""
        group = layer.quantization.group
        if layer.scheme is None or layer.form is None or group is None:
            raise CheckpointError(f"{layer.name}: not a layer that was checked")
        stacked = layer.scheme.stacked
        parts = layer.form.parts({part.kind for part in layer.parts}, layer.quantization.zero_point)
        return cls(SCHEMES[0] if stacked else layer.scheme, layer.form, parts, group)

    def tensors(self, banks: Banks) -> Iterator[tuple[str, torch.Tensor]]:
        """(what follows "experts." in a name, CPU tensor) of every expert, with the codes that were read.

        BF16 scales have become FP16. A zero that changes no weight may be another one
        (`metadata.zeros_of`).
        """
        for expert in range(banks.shape.experts):
            rows = banks.take(expert)
            for name, matrix in (
                (self.scheme.gate, rows.gate),
                (self.scheme.up, rows.up),
                (self.scheme.down, rows.down),
            ):
                for kind, tensor in self._matrix(matrix, banks.layout.group).items():
                    yield self.scheme.tail(expert, name, kind), tensor

    def _matrix(self, rows: Rows, prepared: int) -> dict[str, torch.Tensor]:
        codes = unpack_rows(rows.words.cpu().t().contiguous()).t().to(torch.uint8).contiguous()
        k, n = codes.shape
        group = matrix_group(self.group, k)
        step = group // prepared  # banks repeat a group's values where theirs are finer
        found = encode(self.form, Codes(codes, rows.zeros.cpu()[::step], rows.scales.cpu()[::step]))
        if self.form.index is not None:
            found[self.form.index.kind] = (torch.arange(k) // group).to(torch.int32)
        if self.form.sizes is not None:
            found[self.form.sizes.kind] = torch.tensor([n, k])
        return {part.kind: found[part.kind].contiguous() for part in self.parts}
