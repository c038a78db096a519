"""The contract's arithmetic (CONTRACT 8) in torch, for any device, geometry and number of tokens.

Slots are sorted by expert, so that each expert's weights are decoded once for a chunk of tokens and
dropped before the next. Every matrix product has the same number of rows, padded with zeros: a
token's result then does not depend on which other tokens are in the call or where a chunk ends, as
long as the library multiplies the rows of one product alike (checked by tests on the CPU). It may
depend on torch's number of threads.

On a CPU the ids are read to find which experts are asked for. On a GPU that would wait for the
device, so `device` does it in another way there. Banks with a tensor for each expert can only be
asked by the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sm70_moe.kernels.call import Call
from sm70_moe.kernels.portable import device
from sm70_moe.kernels.portable.fma import fma32
from sm70_moe.kernels.portable.precision import full_fp32
from sm70_moe.kernels.portable.swiglu import activate

if TYPE_CHECKING:
    from sm70_moe.banks.banks import Banks

ROWS = 16
"""Rows of every matrix product. Decoding an expert costs more than 16 rows of products do."""

COMBINED = 1 << 17
"""Elements that are combined at once: six FP64 temporaries of 1 MiB each."""


@dataclass(frozen=True, slots=True)
class Visit:
    """The slots of one expert: slot `(tokens[i], slots[i])` for each i, in order of tokens."""

    expert: int
    tokens: torch.Tensor
    slots: torch.Tensor

    def rows(self) -> Iterator[slice]:
        """The slots in pieces of at most ROWS."""
        return (slice(start, start + ROWS) for start in range(0, len(self.tokens), ROWS))


def run_experts(banks: Banks, call: Call, chunk: int) -> None:
    """Write `call.out` (and `call.intermediate`), `chunk` tokens at a time. Arguments were checked."""
    with full_fp32(call.x.device.type):
        for part in call.chunks(chunk):
            run_chunk(banks, part)


def run_chunk(banks: Banks, call: Call) -> None:
    tokens, top_k = call.ids.shape
    valid = (call.ids >= 0) & (call.ids < banks.shape.experts)
    if on_device(banks, call):
        # one row more: blocks write rows of theirs that are not live behind all others
        rows = call.x.new_zeros(tokens * top_k + 1, banks.shape.hidden)
        device.run_blocks(banks, call, rows)
        last = device.combine if rows.is_cuda else combine
        last(rows[:-1].view(tokens, top_k, banks.shape.hidden), call.weights, valid, call.out)
        return
    # slots that no expert visits stay uninitialised; `combine` does not read them
    products = call.x.new_empty(tokens, top_k, banks.shape.hidden)
    if call.intermediate is not None:
        call.intermediate.zero_()
    for visit in visits(call.ids, banks.shape.experts):
        run_expert(banks, call, visit, products)
    combine(products, call.weights, valid, call.out)


def make_ready(banks: Banks) -> None:
    """Have torch compile what decodes experts on a GPU, which a graph could not capture."""
    if banks.device.type == "cuda" and banks.w13.batched:
        banks.w13.gather(torch.zeros(1, dtype=torch.int64, device=banks.device))


def on_device(banks: Banks, call: Call) -> bool:
    """Must the host not be asked which experts the call wants?"""
    return call.x.device.type != "cpu" and banks.w13.batched and banks.w2.batched


def visits(ids: torch.Tensor, experts: int) -> Iterator[Visit]:
    """The valid slots of ids (M, k), expert by expert; a duplicate id in a row is a slot of its own."""
    flat = ids.cpu().flatten()
    order = torch.argsort(flat, stable=True)
    found, counts = torch.unique_consecutive(flat[order], return_counts=True)
    end = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        start, end = end, end + count
        if 0 <= expert < experts:
            slots = order[start:end].to(ids.device)
            yield Visit(expert, slots // ids.shape[1], slots % ids.shape[1])


def run_expert(banks: Banks, call: Call, visit: Visit, products: torch.Tensor) -> None:
    """Both products of one expert; its weights are decoded one matrix after the other."""
    activations = call.x.new_empty(len(visit.tokens), banks.shape.intermediate)
    w13 = banks.w13.dequantise(visit.expert).float()
    for rows in visit.rows():
        both = product(call.x[visit.tokens[rows]], w13)
        activations[rows] = activate(both.to(call.x.dtype), banks.layout.interleaved)
    del w13
    if call.intermediate is not None:
        call.intermediate[visit.tokens, visit.slots] = activations
    w2 = banks.w2.dequantise(visit.expert).float()
    for rows in visit.rows():
        products[visit.tokens[rows], visit.slots[rows]] = product(activations[rows], w2).to(call.x.dtype)


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows (n, K) times weight (N, K) FP32, transposed: (n, N) FP32, n at most ROWS."""
    padded = weight.new_zeros(ROWS, weight.shape[1])
    padded[: len(rows)] = rows
    return torch.nn.functional.linear(padded, weight)[: len(rows)]


def combine(products: torch.Tensor, weights: torch.Tensor, valid: torch.Tensor, out: torch.Tensor) -> None:
    """FP32 fused multiply-add over the slots in the router's order, then one rounding.

    products (M, k, H), weights and valid (M, k), out (M, H). A slot that is not valid is left out,
    whatever stands in its product and weight.
    """
    step = max(1, COMBINED // products.shape[2])
    for start in range(0, products.shape[0], step):
        rows = slice(start, start + step)
        total = torch.zeros_like(out[rows], dtype=torch.float32)
        for slot in range(products.shape[1]):
            more = fma32(weights[rows, slot, None], products[rows, slot].float(), total)
            total = torch.where(valid[rows, slot, None], more, total)
        out[rows] = total.to(out.dtype)
