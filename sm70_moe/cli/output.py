"""How commands print: tables that are not cut when piped, records as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sm70_moe.decision import Plain

PIPED_WIDTH = 200
"""Columns when the output is no terminal, where rich would assume 80 and cut the tables."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def console() -> Console:
    """A console for standard output, made when it is needed so that redirection applies.

    The stream itself is asked: rich takes FORCE_COLOR, which CI sets, for a terminal that has a width.
    """
    plain = Console(highlight=False, markup=False, emoji=False)  # texts of users are printed as they are
    return plain if plain.file.isatty() else Console(highlight=False, markup=False, emoji=False, width=PIPED_WIDTH)


def print_json(value: Plain) -> None:
    typer.echo(json.dumps(value, indent=2))


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table with these headings; long cells wrap and are never cut."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def events_to_stderr() -> None:
    """Show errors of the journal on standard error; what fell back stands in the commands' own tables.

    The package never configures structlog; a command line is a host, and hosts do.
    """
    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
