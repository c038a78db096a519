"""What a folder holds and nobody reads: files outside the index, experts under names that no scheme has."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sm70_moe.checkpoint.config import CONFIG, ModelConfig
from sm70_moe.checkpoint.folder import left_out
from sm70_moe.checkpoint.headers import INDEX, SINGLE, Headers, entries_of
from sm70_moe.checkpoint.names import MARKER, MOST_DIGITS, experts_elsewhere
from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.formats import FORMATS, WEIGHT

KINDS = frozenset((WEIGHT, *(part.kind for form in FORMATS for part in form.all)))
LAYERS = ".layers."
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Sentences: `unread` are experts that nobody reads, or could be; `notes` are worth knowing."""

    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def leftovers(headers: Headers, config: ModelConfig, layers: Collection[str], others: list[str]) -> Leftovers:
    """What is there beside the layers that were found; `others` are the names of all tensors outside of them."""
    unread, notes = [], list(config.notes)
    indexed = os.path.lexists(headers.folder / INDEX)
    for name in left_out(headers.folder, headers.shards):
        listed = f"{INDEX} names nothing in it" if indexed else f"no index names it beside {SINGLE}"
        known = f"{name} is in the folder, and {listed}"
        try:
            found = entries_of(headers.folder / name)
        except CheckpointError as error:
            unread.append(f"{known}; its header cannot be read: {error}")
            continue
        experts = [tensor for tensor in found if MARKER in tensor]
        if experts:
            unread.append(f"{known}; {len(experts)} of its {len(found)} tensors belong to experts: {_listed(experts)}")
        else:
            notes.append(f"{known}; it holds {len(found)} tensors, none of an expert")
    strange = experts_elsewhere(others, KINDS)
    if strange:
        unread.append(f"{len(strange)} tensors look like those of experts and follow no known name: {_listed(strange)}")
    elif config.experts and config.experts > 1 and not layers:
        unread.append(
            f"{CONFIG} declares {config.experts} experts, and no tensor has {MARKER!r} in its name; "
            f"there are {_listed(others)}"
        )
    return Leftovers(tuple(unread), (*notes, *_layers_without_tensors(config, layers, others)))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "none") + more


def _layers_without_tensors(config: ModelConfig, layers: Iterable[str], others: Iterable[str]) -> list[str]:
    """A word if config.json declares layers of which no tensor is there."""
    if not config.layers:
        return []
    seen = {found for name in (*layers, *others) if (found := _layer_number(name)) is not None}
    lost = config.layers - len({one for one in seen if one < config.layers})
    return [f"{CONFIG} has {config.layers} layers, {lost} of them without any tensor"] if lost else []


def _layer_number(name: str) -> int | None:
    _, _, after = name.partition(LAYERS)
    digits = after.partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS else None
