"""Finds the quantised matrices outside the experts, and refuses those that are incomplete or unreadable by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.names import BIAS
from sm70_moe.checkpoint.quantization import NONE, Quantization
from sm70_moe.checkpoint.shapes import whole
from sm70_moe.engines.transformers.names import Names
from sm70_moe.engines.transformers.placing import Kinds
from sm70_moe.errors import CheckpointError
from sm70_moe.grouping import matrix_group
from sm70_moe.numbers.formats import BITS, CODE_KINDS, Format, Part, accepted, find

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class PlacedLinear:
    """A quantised matrix outside the experts, by its names in checkpoint and model, with its tensors."""

    name: str
    module: str
    form: Format
    parts: tuple[Part, ...]
    group: int


def place_linears(checkpoint: Checkpoint, model: Any, names: Names, beside: Kinds) -> list[PlacedLinear]:
    """Every quantised matrix outside the experts; its tensors are trusted over skip lists.

    Raises CheckpointError, naming it, for one that is incomplete, cannot be read, or is no plain
    linear of the model.
    """
    placed = []
    for name in sorted(module for module, kinds in beside.items() if kinds & CODE_KINDS):
        module = names.module(name, min(beside[name] & CODE_KINDS))
        if module is None and names.aside(name):
            continue
        linear = None if module is None else model.get_submodule(module)
        if module is None or not isinstance(linear, torch.nn.Linear):
            raise CheckpointError(f"{name}: quantised, so a linear is accepted, found {type(linear).__name__}")
        one = _read(checkpoint, name, module, beside[name])
        _check(checkpoint, one, linear)
        placed.append(one)
    return placed


def _read(checkpoint: Checkpoint, name: str, module: str, kinds: set[str]) -> PlacedLinear:
    rules = checkpoint.config.quantization
    said = rules.of(name)
    found: Quantization = rules.stored if said == NONE else said
    form = find(found.format, found.packing)
    if form is None or form.codes.kind not in kinds or found.bits != BITS or found.group is None:
        raise CheckpointError(
            f"{name}: format {found.format}, packing {found.packing}, bits {found.bits}, group {found.group}; "
            f"accepted are {accepted()}"
        )
    return PlacedLinear(name, module, form, form.parts(kinds, found.zero_point), found.group)


def _check(checkpoint: Checkpoint, placed: PlacedLinear, linear: torch.nn.Linear) -> None:
    rows = linear.in_features
    if placed.group == 0 or placed.group < -1 or rows % matrix_group(placed.group, rows):
        raise CheckpointError(f"{placed.name}: group_size {placed.group}; accepted is a divisor of K = {rows}, or -1")
    for kind, dtypes, shape in _wanted(placed, linear):
        name = f"{placed.name}.{kind}"
        entry = checkpoint.headers.find(name)
        if entry is None:
            raise CheckpointError(f"{placed.name}: missing tensors {name}")
        if entry.shape != shape or entry.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} in {entry.file}: {entry.dtype} {list(entry.shape)}; "
                f"accepted is {' or '.join(dtypes)} {list(shape)}"
            )


def _wanted(placed: PlacedLinear, linear: torch.nn.Linear) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """(kind, dtypes, shape) of every tensor that the linear needs."""
    spans = whole(linear.in_features, linear.out_features, placed.group)
    for part in placed.parts:
        yield part.kind, part.dtypes, part.shape(spans)
    if linear.bias is not None:
        yield BIAS, FLOATS, (linear.out_features,)
