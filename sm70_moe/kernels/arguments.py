"""What a call may look like: shapes, dtypes, devices, and buffers that do not overlap.

Shared by backends that run on torch tensors; reads no tensor value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from sm70_moe.errors import BackendError
from sm70_moe.layout import BankShape

if TYPE_CHECKING:
    from sm70_moe.banks.banks import Banks
    from sm70_moe.kernels.call import Call

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_call(banks: Banks, call: Call) -> None:
    """Refuse a call that cannot be run; BackendError names the argument, its value and what is accepted.

    All tensors are on the banks' device; `Call` has their shapes and dtypes.
    """
    shape: BankShape = banks.shape
    x, ids = call.x, call.ids
    if x.dtype not in DTYPES:
        raise BackendError(f"x: dtype {x.dtype}, accepted are {', '.join(map(str, DTYPES))}")
    if ids.dim() != 2:
        raise BackendError(f"ids: shape {tuple(ids.shape)}, expected (tokens, top-k)")
    tokens, top_k = x.shape[0] if x.dim() else -1, ids.shape[1]
    expected = {
        "x": ((tokens, shape.hidden), x.dtype),
        "ids": ((tokens, top_k), torch.int32),
        "weights": ((tokens, top_k), torch.float32),
        "out": ((tokens, shape.hidden), x.dtype),
        "intermediate": ((tokens, top_k, shape.intermediate), x.dtype),
    }
    inputs, outputs = inputs_of(call), outputs_of(call)
    for name, tensor in {**inputs, **outputs}.items():
        check_tensor(name, tensor, *expected[name], banks.device)
    check_overlap(inputs, outputs)
    check_weights(bank_tensors(banks), outputs)


def inputs_of(call: Call) -> dict[str, torch.Tensor]:
    return {"x": call.x, "ids": call.ids, "weights": call.weights}


def outputs_of(call: Call) -> dict[str, torch.Tensor]:
    """The tensors that a call writes."""
    return {"out": call.out} if call.intermediate is None else {"out": call.out, "intermediate": call.intermediate}


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise BackendError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype != dtype:
        raise BackendError(f"{name}: dtype {tensor.dtype}, expected {dtype}")
    if tensor.device != device:
        raise BackendError(f"{name}: on {tensor.device}, expected {device} like the banks")


def check_gradients(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse tensors whose gradients autograd would record: there is no backward, and they would be lost unsaid."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise BackendError(
                f"{name}: requires_grad is True and gradients are recorded; experts are for inference only, "
                "expected a call under torch.no_grad() or torch.inference_mode()"
            )


def check_overlap(inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse outputs that share memory with an input, with each other or with themselves.

    Judged by address ranges: two views that interleave in one storage without a common element
    are refused as well.
    """
    seen = dict(inputs)
    for name, tensor in outputs.items():
        if overlaps_itself(tensor):
            raise BackendError(f"{name}: strides {tensor.stride()} lay several elements on one address")
        for other, against in seen.items():
            if shares_memory(tensor, against):
                raise BackendError(f"{name}: overlaps {other} in memory, expected a buffer of its own")
        seen[name] = tensor


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """May two elements of a tensor have one address? Each stride must step over all smaller ones."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def check_weights(banks: Iterable[torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse outputs that lie in a bank."""
    for tensor in banks:
        for name, output in outputs.items():
            if shares_memory(output, tensor):
                raise BackendError(f"{name}: overlaps the weights in memory, expected a buffer of its own")


def bank_tensors(banks: Banks) -> Iterator[torch.Tensor]:
    """Every tensor of both banks; batched ones are one tensor."""
    for bank in (banks.w13, banks.w2):
        yield from bank.tensors


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do the address ranges of two tensors meet?"""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (first, end), (other_first, other_end) = address_range(one), address_range(other)
    return first < other_end and other_first < end


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor that is not empty; strides of torch are never negative."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size()
