"""Notices that the host's experts implementation changed behind a model's back (R16).

transformers keeps it on the config, and models that are made from one config object share it: a
second model can switch the first one's. Modules of ours do not read it; layers that a checkpoint
left unquantised do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

CHECK = "experts implementation"


@dataclass(frozen=True, slots=True)
class Flip:
    """One config whose experts implementation is another one than when the model was loaded.

    `ours` and `theirs` count layers of experts: ours run as before, theirs follow the config.
    """

    config: str
    before: str | None
    now: str | None
    ours: int
    theirs: int


@dataclass(slots=True)
class Watch:
    """What a model was loaded with, and what was already said."""

    ours: int
    theirs: int
    loaded: dict[str, str | None]
    said: set[Flip] = field(default_factory=set)


_watches: weakref.WeakKeyDictionary[torch.nn.Module, Watch] = weakref.WeakKeyDictionary()
"""Process-wide, by model: it must be neither copied nor saved with the model."""


def watch(model: Any, ours: int, theirs: int) -> None:
    """Remember what the model's configs say now; before each call of the model they are looked at."""
    loaded = {name: config._experts_implementation for name, config in configs(model)}
    _watches[model] = Watch(ours, theirs, loaded)
    model.register_forward_pre_hook(say)


def flips(model: Any) -> tuple[Flip, ...]:
    """What differs from when the model was loaded; empty also for a model that is not ours."""
    known = _watches.get(model)
    if known is None:
        return ()
    present = ((name, config._experts_implementation) for name, config in configs(model))
    return tuple(
        Flip(name, known.loaded[name], now, known.ours, known.theirs)
        for name, now in present
        if now != known.loaded.get(name, now)
    )


def say(model: Any, _: Any) -> None:
    """One warning for each flip, before the model runs."""
    if torch.compiler.is_compiling():
        return  # a compiled graph has its implementation in it
    for flip in flips(model):
        said = _watches[model].said
        if flip not in said:
            said.add(flip)
            structlog.get_logger("sm70_moe").warning(
                "moe drift",
                check=f"{CHECK} of {flip.config}",
                expected=flip.before,
                observed=flip.now,
                text=f"another model with the same config object, or set_experts_implementation, changed it: "
                f"{flip.ours} layers of ours run as before, {flip.theirs} follow it",
            )


def configs(model: Any) -> Iterator[tuple[str, Any]]:
    """A model's config and the one of its text model, if that is another."""
    whole, text = model.config, model.config.get_text_config(decoder=True)
    yield type(whole).__name__, whole
    if text is not whole:
        yield type(text).__name__, text
