"""`sm70-moe version`."""

from __future__ import annotations

import typer


def version() -> None:
    """Print the version."""
    from sm70_moe import __version__

    typer.echo(__version__)
