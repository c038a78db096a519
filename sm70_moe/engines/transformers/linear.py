"""A quantised linear outside the experts, in plain torch: what the attention's projections need.

It keeps the checkpoint's own tensors and unpacks them at every call. That is slow and small: the
experts are where the time goes and what this package is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from sm70_moe.banks.metadata import bias
from sm70_moe.banks.packing import fused
from sm70_moe.checkpoint.shapes import whole
from sm70_moe.errors import CheckpointError
from sm70_moe.grouping import matrix_group
from sm70_moe.numbers.decoding import DTYPES, SYMMETRIC_ZERO, turned
from sm70_moe.numbers.formats import Format, Part


class PackedLinear(torch.nn.Module):
    """x (..., K) -> (..., N), with 4-bit weights in any format of `formats.FORMATS`.

    A weight is round16(code * scale + bias) as in the experts; sums are FP32 and rounded once to
    the dtype of x. `group` may be -1. Parameters have the checkpoint's names and shapes.
    """

    def __init__(self, k: int, n: int, form: Format, parts: tuple[Part, ...], group: int, with_bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = k, n
        self.form, self.parts, self.group = form, parts, group
        for part in parts:
            # scales stay FP16 in any model: BF16 ones become FP16 here, others as they are
            dtype = torch.float16 if part is form.scales else DTYPES[part.dtypes[0]]
            empty = torch.empty(part.shape(whole(k, n, group)), dtype=dtype)
            self.register_parameter(part.kind, torch.nn.Parameter(empty, requires_grad=False))
        self.bias = torch.nn.Parameter(torch.empty(n), requires_grad=False) if with_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = linear(x.to(torch.float32), self.dequantised().to(torch.float32)).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def dequantised(self) -> torch.Tensor:
        """FP16 weights (N, K), the same bits as `decoding.decode` and `packing.fused` give."""
        form = self.form
        scale = turned(form.scales, self.get_parameter(form.scales.kind))
        codes = unpacked(form.codes, self.get_parameter(form.codes.kind))
        zeros = torch.full_like(scale, SYMMETRIC_ZERO)
        if form.zeros in self.parts:
            zeros = unpacked(form.zeros, self.get_parameter(form.zeros.kind))
        return fused(codes.t(), scale, bias(scale, zeros))

    def check(self, name: str) -> None:
        """What only values tell: raises CheckpointError for rows that are permuted among the groups."""
        index, rows = self.form.index, matrix_group(self.group, self.in_features)
        if index in self.parts and index is not None:
            found = self.get_parameter(index.kind)
            if not torch.equal(found, torch.arange(self.in_features, device=found.device) // rows):
                raise CheckpointError(
                    f"tensor {name}.{index.kind}: rows are permuted among the groups (act-order); "
                    f"accepted is row // {rows}"
                )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.form.name}, group={self.group}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`half()`, `float()` and so on leave the scales FP16: they are part of the weights' arithmetic."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            scales = tensor is self._parameters.get(self.form.scales.kind)
            return tensor.to(moved.device) if scales and moved.dtype != tensor.dtype else moved

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def unpacked(part: Part, words: torch.Tensor) -> torch.Tensor:
    """INT32 words -> INT32 codes 0..15 as (rows or groups, columns): `decoding.unpack_part` in
    operations that torch.compile can trace.
    """
    assert part.order is not None
    # a sum that wraps is right: only its 32 bits are read, and INT64 keeps it defined
    whole_words = words.to(torch.int64) + part.plus
    shifts = torch.tensor([4 * nibble for nibble in part.order], device=words.device)
    along = part.packed + 1
    shape = [-1 if dim == along else 1 for dim in range(words.dim() + 1)]
    values = (whole_words.unsqueeze(along) >> shifts.view(shape)) & 15
    return turned(part, values.flatten(along - 1, along).to(torch.int32))
