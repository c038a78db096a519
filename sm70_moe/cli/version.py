"""`sm70-moe version`."""

from __future__ import annotations

from sm70_moe.cli.output import line


def version() -> None:
    """Print the version."""
    from sm70_moe import __version__

    line(__version__)
