"""How the program ends: its exit codes, and the one line that says why.

A command that meets what nobody has foreseen must not end as one whose answer is no.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from sm70_moe.cli.output import aside
from sm70_moe.cli.streams import OutputLost, give_up, make_usable
from sm70_moe.errors import Sm70MoeError

PACKAGE = Path(__file__).parents[1]

LONGEST = 1_000
"""Characters of an unforeseen error's own text."""


class Code(IntEnum):
    """Exit codes; 130, 141 and 143 are what shells give to a program that a signal ended."""

    DONE = 0
    NO = 1
    BAD_INPUT = 2
    UNFORESEEN = 3
    INTERRUPTED = 130
    READER_LEFT = 141
    TERMINATED = 143


class Unforeseen(Exception):
    """What a command raised and the parser of the command line would give a meaning of its own."""

    def __init__(self, error: BaseException, whole: bool) -> None:
        self.error, self.whole = error, whole


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever is being made is cleaned up on the way out, as after an interruption."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM as an exception, while a command runs in the main thread."""

    def terminate(_: int, __: FrameType | None) -> NoReturn:
        raise Terminated

    before: Any = None
    with suppress(ValueError):  # another thread has no signals
        before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def kept_apart(whole: bool = False) -> Iterator[None]:
    """Errors on their way through click, which makes 1 of a closed pipe; `whole`: with the traceback."""
    try:
        yield
    except (typer.Exit, typer.Abort, Sm70MoeError, Unforeseen, OutputLost):
        raise
    except GeneratorExit:
        raise
    except BaseException as error:
        if hasattr(error, "format_message"):  # click's own, of whichever copy of it typer has
            raise
        raise Unforeseen(error, whole) from error


def run(program: Callable[[], object]) -> int:
    """Run the program to its end; its exit code."""
    make_usable()
    with ended_by_sigterm():
        code = ended(program)
    try:
        sys.stdout.flush()  # help is not written by us
    except OSError as error:
        give_up(sys.stdout)
        if code != Code.UNFORESEEN:  # else it was told: help that could not be written ends so
            code = lost(OutputLost(error))
    return code


def ended(program: Callable[[], object]) -> int:
    try:
        found = program()
    except Sm70MoeError as error:
        return wrong(error)
    except OutputLost as error:
        return lost(error)
    except typer.Abort:
        return interrupted()
    except Unforeseen as error:
        return unforeseen(error.error, error.whole)
    except Exception as error:
        return misused(error) if hasattr(error, "format_message") else unforeseen(error, False)
    return found if isinstance(found, int) else Code.DONE


def wrong(error: Sm70MoeError) -> int:
    first, *more = error.lines or ("",)
    for text in (f"error: {first}", *more):
        aside(text)
    return Code.BAD_INPUT


def misused(error: Exception) -> int:
    """Options and arguments that are not accepted, as click tells them."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # help was printed
        return Code.BAD_INPUT
    if context is not None:
        for text in context.get_usage().splitlines():
            aside(text)
        aside(f"Try '{context.command_path} --help' for help.")
    aside(f"error: {error.format_message()}")  # type: ignore[attr-defined]  # asked for by who calls
    return Code.BAD_INPUT


def lost(error: OutputLost) -> int:
    """Whoever reads a pipe may have read enough: no error."""
    if error.reader_left:
        return Code.READER_LEFT
    aside(f"error: {error}")
    return Code.UNFORESEEN


def interrupted() -> int:
    aside("interrupted")
    return Code.INTERRUPTED


def unforeseen(error: BaseException, whole: bool) -> int:
    """One line that names what happened and where; all of the traceback if it was asked for."""
    if isinstance(error, Terminated):
        aside("terminated")
        return Code.TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return interrupted()
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):  # so does rich, in a help
        give_up(sys.stdout)
        return Code.READER_LEFT
    if whole:
        for text in "".join(traceback.format_exception(error)).splitlines():
            aside(f"| {text}")
    more = "" if whole else "; `sm70-moe --traceback COMMAND ...` shows how it came to that"
    aside(f"error: unforeseen: {type(error).__name__}: {text_of(error)}{place_of(error)}{more}")
    return Code.UNFORESEEN


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a plug-in's class may fail to print
        return "(no text)"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def place_of(error: BaseException) -> str:
    """The last line of ours that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if PACKAGE in Path(frame.filename).parents]
    return f" (sm70_moe/{Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].lineno})" if ours else ""
