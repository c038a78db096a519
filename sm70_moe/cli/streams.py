"""The program's standard streams: made usable, written to by one function each, nothing lost unseen."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO


class OutputLost(Exception):
    """Standard output could not be written; the error is its cause."""

    def __init__(self, error: OSError) -> None:
        self.reader_left = isinstance(error, BrokenPipeError)
        super().__init__(f"standard output cannot be written: {error.strerror or error}")


def make_usable() -> None:
    """Streams that the caller closed are opened, so that no file of ours gets their number.

    Writing to a standard output that was closed fails as it must; what is said on standard error is lost. Signs that an
    encoding lacks are written as escapes.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  the process's own, as Python opens it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """To standard output, at once. Raises OutputLost."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        give_up(sys.stdout)
        raise OutputLost(error) from error


def write_aside(text: str) -> None:
    """To standard error; where that cannot be written, there is nobody to tell."""
    Aside().write(text)


class Aside:
    """Standard error as a file that never fails, for what draws progress there.

    It keeps the stream that it was made with: while progress is drawn, `sys.stderr` is what hands lines to the drawing.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self.stream = sys.stderr

    def write(self, text: str) -> int:
        if self.stream is not None:
            try:
                self.stream.write(text)
                self.stream.flush()
            except OSError:
                give_up(self.stream)
        return len(text)

    def flush(self) -> None:
        self.write("")

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


def give_up(stream: TextIO) -> None:
    """What still waits in a stream that cannot be written goes nowhere, also when Python ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
