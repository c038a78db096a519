"""What a `WeightSource` may offer beyond `read`; each is looked for, none is needed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sm70_moe.weights.codes import WeightSource
from sm70_moe.weights.rows import ExpertRows


@runtime_checkable
class RowSource(Protocol):
    """Gives row words itself, without the detour over codes."""

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        """What `read` gives, packed."""


@runtime_checkable
class Fetching(Protocol):
    """Can have an expert's bytes read ahead."""

    def fetch(self, expert: int) -> None:
        """Begin it; does not wait, raises nothing for what cannot be read."""


@runtime_checkable
class Identified(Protocol):
    """Knows whose weights it has, so that banks that were prepared from them can be kept."""

    @property
    def digest(self) -> str:
        """A text that differs for different weights."""


@runtime_checkable
class Releasable(Protocol):
    """Holds memory that nobody needs once the banks are complete."""

    def release(self) -> None:
        """Let go of it; nothing is read afterwards."""


def read_rows(source: WeightSource, expert: int, group: int) -> ExpertRows:
    """One expert of any source, packed."""
    if isinstance(source, RowSource):
        return source.read_rows(expert, group)
    return ExpertRows.of(source.read(expert, group))


def fetch(source: WeightSource, expert: int) -> None:
    """Tell a source that an expert, if it has it, will be read soon."""
    if isinstance(source, Fetching) and expert < source.experts:
        source.fetch(expert)


def release(source: WeightSource) -> None:
    """Tell a source that the banks are complete."""
    if isinstance(source, Releasable):
        source.release()
