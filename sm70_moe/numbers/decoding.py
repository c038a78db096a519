"""Between stored tensors and codes, for every row of `formats.FORMATS`; nothing here knows a format's name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.formats import VALUES, Axis, Format, Part
from sm70_moe.numbers.rows import Rows
from sm70_moe.numbers.rowwords import reordered, transposed
from sm70_moe.numbers.scales import half
from sm70_moe.numbers.words import pack, unpack

SYMMETRIC_ZERO = 8
"""What a file without zeros means: codes 0..15 stand for -8..7."""

DTYPES = {
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

WHOLE_WORD = 2**32


def decode(form: Format, tensors: Mapping[str, torch.Tensor], groups: tuple[int, ...], name: str = "") -> Codes:
    """One matrix's codes, with row j of zeros and scales taken from row `groups[j]` of the source.

    `tensors` are by kind; zeros that are not there stand for 8. Raises CheckpointError, naming the
    tensor after `name`, for another dtype and for BF16 scales that `scales.half` refuses; FP16 ones are
    taken as they are, their values are the caller's to look at.
    """
    zeros, scales = decode_groups(form, tensors, groups, name)
    return Codes(unpack_part(form.codes, tensors[form.codes.kind]).contiguous(), zeros, scales)


def decode_rows(form: Format, tensors: Mapping[str, torch.Tensor], groups: tuple[int, ...], name: str = "") -> Rows:
    """What `decode` gives, as row words: the codes are moved from word to word and never unpacked.

    Tensors may have a dimension in front, for several experts at once.
    """
    zeros, scales = decode_groups(form, tensors, groups, name)
    part = form.codes
    assert part.order is not None
    words = turned(part, tensors[part.kind])
    along_rows = part.dims[part.packed].axis is Axis.K
    return Rows(reordered(words, part.order) if along_rows else transposed(words, part.order), zeros, scales)


def decode_groups(
    form: Format, tensors: Mapping[str, torch.Tensor], groups: tuple[int, ...], name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros and scales of one matrix; the dtypes of all of its tensors are checked."""
    for part in (form.codes, form.zeros, form.scales):
        _require_dtype(f"{name}{part.kind}", tensors.get(part.kind), part)
    scales = turned(form.scales, tensors[form.scales.kind])
    if scales.dtype is not torch.float16:
        scales, _ = half(f"{name}{form.scales.kind}", scales)
    words = tensors.get(form.zeros.kind)
    if words is None:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8)
    else:
        zeros = unpack_part(form.zeros, words)
    if groups == tuple(range(scales.shape[-2])):  # the usual case: nothing is repeated or left out
        return zeros, scales
    rows = torch.tensor(groups, device=scales.device)
    return zeros[..., rows, :], scales[..., rows, :]


def encode(form: Format, codes: Codes) -> dict[str, torch.Tensor]:
    """The stored codes, zeros and scales of a whole matrix: what `decode` reads back."""
    return {
        form.codes.kind: pack_part(form.codes, codes.codes),
        form.zeros.kind: pack_part(form.zeros, codes.zeros),
        form.scales.kind: turned(form.scales, codes.scales).contiguous(),
    }


def unpack_part(part: Part, words: torch.Tensor) -> torch.Tensor:
    """Words of one tensor -> uint8 in 0..15 as (rows or groups, columns)."""
    assert part.order is not None
    if part.plus:
        words = _add(words, part.plus)
    return turned(part, unpack(words, part.order, part.packed - 2))


def pack_part(part: Part, values: torch.Tensor) -> torch.Tensor:
    """uint8 in 0..15 as (rows or groups, columns) -> INT32 words as they are stored."""
    assert part.order is not None
    stored, place = turned(part, values), part.packed
    eights = stored.reshape(*stored.shape[:place], -1, VALUES, *stored.shape[place + 1 :])
    words = pack(eights.movedim(place + 1, -1), part.order)
    return _add(words, -part.plus) if part.plus else words


def turned(part: Part, values: torch.Tensor) -> torch.Tensor:
    """Stored order of the dimensions to (rows or groups, columns), or back."""
    return values.transpose(-2, -1) if part.dims[0].axis is Axis.N else values


def _add(words: torch.Tensor, number: int) -> torch.Tensor:
    """Whole words plus a number, modulo 2^32: carries go from nibble to nibble and out at the top."""
    # as INT64, because the wrap of INT32 arithmetic is no promise
    total = (words.to(torch.int64) + number) % WHOLE_WORD
    return (total - (total >= WHOLE_WORD // 2) * WHOLE_WORD).to(torch.int32)


def _require_dtype(name: str, tensor: torch.Tensor | None, part: Part) -> None:
    accepted = [DTYPES[dtype] for dtype in part.dtypes]
    if tensor is not None and tensor.dtype not in accepted:
        raise CheckpointError(f"{name} is {tensor.dtype}; accepted is {' or '.join(map(str, accepted))}")
