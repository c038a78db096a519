"""Where decisions and events go: the journal, and whatever an engine adds beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Plain, plain_text
from sm70_moe.printable import printable

LOGGER = logging.getLogger("sm70_moe")


@dataclass(frozen=True, slots=True)
class Text:
    """An event's fields for a log that has lines: its text where it has one; written out only if somebody listens."""

    fields: Mapping[str, Plain]

    def __str__(self) -> str:
        fields = self.fields
        said = fields.get("text")
        if "feature" in fields:
            decided = f"{fields['feature']} {fields.get('outcome')}, layers {fields.get('layers')}"
            return printable(f"{decided}: {said}" if said else decided)
        if said:
            return printable(f"{said} [{fields['layer']}]" if "layer" in fields else str(said))
        return printable(", ".join(f"{name} {plain_text(value)}" for name, value in fields.items()))


class Sink(Protocol):
    """Takes what a service tells. Whatever it raises, deciding goes on without it.

    It is called while the service decides, from any thread: it must not call the service.
    """

    def admitted(self, admission: Admission) -> None:
        """One layer was decided, refused ones too; alike layers come one by one."""

    def event(self, name: str, level: str = "info", **fields: Plain) -> None:
        """Something else: "moe settings", "moe summary", "moe drift", "moe capture", "moe cache", "moe kernels",
        "moe proof", "moe proven", "moe warm-up", "moe weights" or "moe sink".
        """

    def flush(self) -> None:
        """Write what is held back: admission has ended, or the service goes away."""


class Sinks:
    """Several sinks as one. One that raises is told of once, by the others, and dropped."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._open = list(sinks)

    def admitted(self, admission: Admission) -> None:
        self._tell(lambda sink: sink.admitted(admission))

    def event(self, name: str, level: str = "info", **fields: Plain) -> None:
        self._tell(lambda sink: sink.event(name, level, **fields))

    def flush(self) -> None:
        self._tell(lambda sink: sink.flush())

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for sink in tuple(self._open):
            try:
                what(sink)
            except (Exception, SystemExit) as error:  # another one's code: its fault is no reason to stop an engine
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: BaseException) -> None:
        left = [other for other in self._open if other is not sink]
        if len(left) == len(self._open):
            return  # another thread was first
        self._open = left
        name, text = type(sink).__name__, f"{type(error).__name__}: {error}"
        fields: dict[str, Plain] = {"sink": name, "text": f"sink {name} is dropped: {text}"}
        if left:
            self.event("moe sink", "error", **fields)
        else:
            say("moe sink", "error", fields)


def say(name: str, level: str, fields: dict[str, Plain]) -> str:
    """A structlog event under the host's configuration; what that raised as text, "" for nothing.

    Standard output may be closed, a processor may be broken. A program that has not configured structlog has not asked
    for anything on its standard output, where structlog would print: it gets a record of `logging` instead.
    """
    try:
        if structlog.is_configured():
            getattr(structlog.get_logger("sm70_moe"), level)(name, **fields)
        else:
            LOGGER.log(logging.getLevelNamesMapping()[level.upper()], "%s: %s", name, Text(fields))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""
