"""How commands print: the one place, in which everything that was given is escaped.

A line is a line, whatever names stand in it; a cell of a table is text and no markup. Tables are not cut when piped;
records are JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm70_moe.cli.streams import Aside, write, write_aside
from sm70_moe.decision import Plain
from sm70_moe.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress

PIPED_WIDTH = 200
"""Columns when the output is no terminal, where rich would assume 80 and cut the tables."""

UNCUT = 100_000
"""Columns of a table of policies in a pipe: nothing is ever wrapped."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def line(text: str = "", style: str = "") -> None:
    """One line on standard output. Raises OutputLost."""
    shown(Text(printable(text), style), 0)


def aside(text: str) -> None:
    """One line on standard error."""
    write_aside(printable(text) + "\n")


class Grid:
    """A table with these headings; long cells wrap and are never cut."""

    def __init__(self, *columns: str, title: str | None = None) -> None:
        head = Text(printable(title)) if title is not None else None
        self.table = Table(title=head, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in columns:
            self.table.add_column(Text(printable(column)), overflow="fold")

    def add_row(self, *cells: str | Sequence[str]) -> None:
        """A row; a cell of several texts has a line for each."""
        self.table.add_row(*(Text(cell_text(cell)) for cell in cells))

    def show(self, piped_width: int = PIPED_WIDTH) -> None:
        """On standard output. Raises OutputLost."""
        shown(self.table, piped_width)


def cell_text(cell: str | Sequence[str]) -> str:
    return "\n".join(map(printable, (cell,) if isinstance(cell, str) else cell))


class Drawing(StringIO):
    """What will be written to standard output: a terminal where that is one, so that FORCE_COLOR alone makes none."""

    def isatty(self) -> bool:
        return sys.stdout.isatty()


def shown(what: Text | Table, piped_width: int) -> None:
    """Draw and write. A line (no width) is left to the terminal to wrap, so that commands in it can be copied."""
    drawing = Drawing()
    width = None if drawing.isatty() else piped_width or PIPED_WIDTH
    out = Console(file=drawing, highlight=False, markup=False, emoji=False, width=width)
    out.print(what, soft_wrap=not piped_width)
    write(drawing.getvalue())


def print_json(value: Plain) -> None:
    """Plain ASCII, whatever strings are in it. Raises OutputLost."""
    write(json.dumps(value, indent=2).replace("\x7f", "\\u007f") + "\n")


class Bar:
    """Progress on standard error, with a line that says at what."""

    def __init__(self, bars: Progress, text: str, total: float | None) -> None:
        self._bars, self._task = bars, bars.add_task(printable(text), total=total)

    def at(self, done: float, total: float | None = None, text: str | None = None) -> None:
        said = {} if text is None else {"description": printable(text)}
        self._bars.update(self._task, completed=done, total=total, **said)  # type: ignore[arg-type]  # description alone

    def advance(self) -> None:
        self._bars.advance(self._task)

    @property
    def done(self) -> float:
        return self._bars.tasks[0].completed


@contextmanager
def progress(text: str, total: float | None = None) -> Iterator[Bar]:
    """On standard error; `total` may come later."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=aside_console()) as bars:
        yield Bar(bars, text, total)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """What is being done, on standard error while it is; call it to say what comes next."""
    with aside_console().status(Text(printable(text))) as shown:
        yield lambda more: shown.update(Text(printable(more)))


def aside_console() -> Console:
    return Console(file=cast("IO[str]", Aside()), highlight=False, markup=False, emoji=False)


def events_to_stderr() -> None:
    """Show errors of the journal on standard error; what fell back stands in the commands' own tables.

    The package never configures structlog; a command line is a host, and hosts do.
    """
    import structlog

    structlog.reset_defaults()
    structlog.configure(
        processors=[escaped, *structlog.get_config()["processors"]],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(cast("Any", Aside())),
        cache_logger_on_first_use=False,
    )


def escaped(_: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """A processor: an event's texts as they may be shown."""
    return {printable(name): shown_value(value) for name, value in event.items()}


def shown_value(value: Any) -> Any:
    """Texts in lists and tables too; the rest has a form of its own."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {shown_value(key): shown_value(item) for key, item in value.items()}
    return [shown_value(item) for item in value] if isinstance(value, list | tuple) else value
