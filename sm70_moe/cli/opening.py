"""What the commands that read a checkpoint have in common: opening it, what is told of it, and the assumption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.model_types import read_model_types
from sm70_moe.cli.output import aside
from sm70_moe.settings.parsing import ASSUMPTIONS
from sm70_moe.settings.settings import Settings

MOST_RANKS, MOST_LAYERS = 1024, 1024
"""More than any engine has, or model; what is to be done grows with them."""


def named(text: str) -> Path:
    """The name of a folder that is written; an empty one would be the current folder."""
    if not text:
        raise typer.BadParameter("is empty; accepted is the name of a folder, . for the current one")
    if "\0" in text:
        raise typer.BadParameter(f"{text!r} holds a NUL, which no name does")
    return Path(text)


Written = partial(typer.Argument, parser=named)
"""The argument of a folder that is written."""

Assume = Annotated[
    str | None,
    typer.Option(
        "--assume",
        metavar="|".join(ASSUMPTIONS),
        help="What is not known of the layers' arithmetic is taken to be this; what is known stays.",
    ),
]


def open_checkpoint(folder: Path, settings: Settings) -> Checkpoint:
    """The opened folder; what nobody reads in it, and what is worth knowing, on standard error."""
    checkpoint = Checkpoint.open(folder, read_model_types(settings.model_types))
    for text in checkpoint.notes:
        aside(f"note: {text}")
    for text in checkpoint.unread:
        aside(f"not read: {text}")
    return checkpoint


def tell_notes(checkpoint: Checkpoint) -> None:
    """The layers' notes on standard error, alike ones once."""
    notes: dict[str, list[str]] = {}
    for layer in checkpoint.layers:
        for note in layer.notes:
            notes.setdefault(note, []).append(layer.name)
    for note, layers in notes.items():
        more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
        aside(f"note: {layers[0]}{more}: {note}")


def is_whole(checkpoint: Checkpoint) -> bool:
    """Is every tensor understood that belongs to experts, or could?"""
    readable = ("none", None)
    ours = (layer for layer in checkpoint.layers if layer.quantization.format not in readable)
    return not checkpoint.unread and not any(layer.unread for layer in ours)
