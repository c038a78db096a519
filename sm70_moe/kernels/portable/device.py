"""The contract's arithmetic on a device: slots in blocks of one expert, many blocks in one batched product.

No id is read on the host and nothing waits for the device, so that a call can be captured in a CUDA graph. The
work depends on shapes alone: enough blocks for any routing, some of them empty, in pieces of a bounded size.
FP16 products are the library's own, with FP32 sums; weights are FP16, which BF16 does not hold, so that
products of BF16 (and FP32) activations are FP32 ones.

A row's bits do not depend on the other rows of a call, but on the number of tokens: it chooses the shapes
of the products, and with them the library's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sm70_moe.kernels.call import Call
from sm70_moe.kernels.portable.blocks import Blocks, blocks_of
from sm70_moe.kernels.portable.cut import Cut
from sm70_moe.kernels.portable.swiglu import activate

if TYPE_CHECKING:
    from sm70_moe.banks.banks import Bank, Banks


def run_blocks(banks: Banks, call: Call, rows_out: torch.Tensor) -> None:
    """Both products of every block into rows_out (M * k + 1, H).

    Rows that are not live read zeros and write to the last row. Slots without an expert stay as they are.
    """
    slots, top_k = call.ids.numel(), call.ids.shape[1]
    if not slots:
        return
    cut = Cut.of(banks.shape, slots, halves(call.x))
    blocks = blocks_of(call.ids, banks.shape.experts, cut.rows)
    inner = None if call.intermediate is None else rows_out.new_empty(slots + 1, banks.shape.intermediate)
    for start in range(0, cut.blocks, cut.piece):
        run_piece(banks, call.x, top_k, blocks.part(start, start + cut.piece), rows_out, inner)
    if call.intermediate is not None and inner is not None:
        valid = ((call.ids >= 0) & (call.ids < banks.shape.experts)).unsqueeze(-1)
        call.intermediate.copy_(torch.where(valid, inner[:slots].view_as(call.intermediate), 0))


def run_piece(
    banks: Banks, x: torch.Tensor, top_k: int, blocks: Blocks, rows_out: torch.Tensor, inner: torch.Tensor | None
) -> None:
    """P blocks of R rows at once."""
    target = torch.where(blocks.live, blocks.slots, len(rows_out) - 1).flatten()
    rows = torch.where(blocks.live.unsqueeze(-1), x[blocks.slots // top_k], 0)
    activations = activate(product(rows, banks.w13, blocks.experts), banks.layout.interleaved)
    del rows
    if inner is not None:
        inner.index_copy_(0, target, activations.flatten(0, 1))
    rows_out.index_copy_(0, target, product(activations, banks.w2, blocks.experts).flatten(0, 1))


def product(rows: torch.Tensor, bank: Bank, experts: torch.Tensor) -> torch.Tensor:
    """rows (P, R, K) times the weights of each block's expert -> (P, R, N), summed in FP32 and rounded once."""
    weights = bank.gather(experts).transpose(1, 2)
    if halves(rows):
        return torch.bmm(rows, weights)
    return torch.bmm(rows.float(), weights.float()).to(rows.dtype)


def halves(x: torch.Tensor) -> bool:
    """Are products FP16, with FP32 sums?"""
    return x.dtype == torch.float16 and x.is_cuda


def combine(products: torch.Tensor, weights: torch.Tensor, valid: torch.Tensor, out: torch.Tensor) -> None:
    """`experts.combine` in one pass a slot: on a GPU torch's FP32 `addcmul` is a fused multiply-add.

    A slot that is not valid has zeros as its product, and adds exactly nothing: the sum is never -0.
    """
    weights = torch.where(valid, weights, 0)
    total = torch.zeros_like(out, dtype=torch.float32)
    for slot in range(products.shape[1]):
        total.addcmul_(products[:, slot], weights[:, slot, None])
    out.copy_(total)
