"""Finds the experts of a model that a checkpoint has quantised, and refuses what does not fit by name.

All of it from headers, before a weight is read: transformers itself does not check quantised
modules, fills what is missing with random numbers, and lets a missing expert shift those above it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.checkpoint.model_types import ModelTypes
from sm70_moe.checkpoint.names import MARKER
from sm70_moe.engines.transformers.names import Names
from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.formats import CODE_KINDS

UNQUANTISED = "none"
SAFETENSORS = ".safetensors"

Kinds = dict[str, set[str]]
"""Modules outside the experts, and the last components of their tensors' names."""


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """A checkpoint's layer and the module that is its experts."""

    layer: CheckpointLayer
    module: str

    @property
    def quantised(self) -> bool:
        return self.layer.quantization.format != UNQUANTISED


def open_checkpoint(files: list[str] | None, types: ModelTypes | None = None) -> Checkpoint:
    """The folder that transformers found; `types` say what model types compute.

    Raises CheckpointError for anything but safetensors files.
    """
    found = files or []
    other = next((file for file in found if not file.endswith(SAFETENSORS)), None)
    if not found or other is not None:
        raise CheckpointError(f"{other or 'a state_dict'}: accepted are {SAFETENSORS} files beside a config.json")
    return Checkpoint.open(Path(found[0]).parent, types)


def kinds_beside(checkpoint: Checkpoint) -> Kinds:
    """What the checkpoint has outside the experts."""
    found: Kinds = {}
    for shard in checkpoint.headers.shards.values():
        for name in shard:
            if MARKER not in name:
                module, _, kind = name.rpartition(".")
                found.setdefault(module, set()).add(kind)
    return found


def experts_modules(model: Any) -> dict[str, Any]:
    """Modules that hold many experts' weights, as transformers 5 has them: name -> module."""
    return {name: module for name, module in model.named_modules() if _stack(module) is not None}


def place_layers(checkpoint: Checkpoint, model: Any, names: Names, beside: Kinds) -> list[PlacedLayer]:
    """Every layer of experts in the checkpoint with its module.

    Raises CheckpointError, naming layer or tensor, for one that is incomplete, has other sizes than
    the model or no counterpart in it, and for experts of the model that the checkpoint does not have.
    """
    modules = experts_modules(model)
    placed = []
    for layer in checkpoint.layers:
        module = names.module(layer.name, next(iter(layer.tails)))
        if module in modules:
            placed.append(PlacedLayer(layer, module))
        elif not names.aside(layer.name):
            raise CheckpointError(f"{layer.name}: the model has experts at {', '.join(modules) or 'no place'}")
    empty = sorted(modules.keys() - {one.module for one in placed})
    if empty:
        raise CheckpointError(f"{', '.join(empty)}: no tensors in {checkpoint.folder}")
    for one in placed:
        _check_sizes(checkpoint, one, modules[one.module])
        _check_block(one, names, beside)
    return placed


def _stack(module: Any) -> torch.Tensor | None:
    """The down projections of all experts, (E, H, I) or (E, I, H)."""
    found = module._parameters.get("down_proj")
    return found if isinstance(found, torch.Tensor) and found.dim() == 3 else None


def _check_sizes(checkpoint: Checkpoint, placed: PlacedLayer, module: Any) -> None:
    geometry = checkpoint.check(placed.layer) if placed.quantised else checkpoint.geometry(placed.layer)
    down = _stack(module)
    if geometry is None or down is None:
        return
    experts, hidden, inner = placed.layer.experts, geometry.hidden, geometry.intermediate
    if tuple(down.shape) not in ((experts, hidden, inner), (experts, inner, hidden)):
        raise CheckpointError(
            f"{placed.layer.name}: experts, hidden and intermediate size {(experts, hidden, inner)} by the tensors; "
            f"the model's {placed.module}.down_proj is {tuple(down.shape)}"
        )


def _check_block(placed: PlacedLayer, names: Names, beside: Kinds) -> None:
    """What stands beside the experts, router above all, must be there too: it would be random."""
    theirs = placed.layer.name.removesuffix(MARKER[1:-1])
    ours = placed.module.rpartition(".")[0] + "."
    there: set[str | None] = set()
    quantised: set[str | None] = set()
    for module in (module for module in beside if f"{module}.".startswith(theirs)):
        there |= {names.tensor(f"{module}.{kind}") for kind in beside[module]}
        # a quantised linear has no `weight`; its tensors are checked with the linears
        quantised |= {names.module(module, kind) for kind in beside[module] & CODE_KINDS}
    wanted = {name for name in names.tensors if name.startswith(ours) and not name.startswith(f"{placed.module}.")}
    lost = sorted(name for name in wanted - there if name.rpartition(".")[0] not in quantised)
    if lost:
        raise CheckpointError(f"{placed.layer.name}: missing beside the experts: {', '.join(lost)}")
