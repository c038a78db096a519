"""What a `WeightSource` may offer beyond `read`; each is looked for, none is needed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sm70_moe.numbers.codes import Codes, ExpertCodes, WeightSource
from sm70_moe.numbers.rows import ExpertRows


@runtime_checkable
class RowSource(Protocol):
    """Gives row words itself, without the detour over codes."""

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        """What `read` gives, packed."""


@runtime_checkable
class BatchSource(Protocol):
    """Gives row words of several experts at once: fewer and larger operations, which threads can share."""

    def read_batch(self, experts: range, group: int) -> ExpertRows:
        """What `read_rows` gives for each of these experts, first dimension."""


@runtime_checkable
class ColumnSource(Protocol):
    """Gives some columns of an expert without reading the others: what a proof compares with."""

    def read_columns(self, expert: int, group: int, inner: range, outer: range) -> ExpertCodes:
        """What `read` gives, of the columns `inner` of gate and up and `outer` of down; multiples of 8."""


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
class Checkable(Protocol):
    """Can tell whether what it reads from is still what it was when it was opened."""

    def check(self) -> None:
        """Raise CheckpointError that names what changed."""


@runtime_checkable
class Releasable(Protocol):
    """Holds memory that nobody needs once the banks are complete."""

    def release(self) -> None:
        """Let go of it; nothing is read afterwards."""


@runtime_checkable
class Remarking(Protocol):
    """Has something to say of the values that it read."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences, each with the tensor's name."""


def remarks(source: WeightSource) -> tuple[str, ...]:
    """What a source says of the values that were read."""
    return source.remarks if isinstance(source, Remarking) else ()


def read_rows(source: WeightSource, expert: int, group: int) -> ExpertRows:
    """One expert of any source, packed; what it raises gets the expert's number as a note."""
    try:
        if isinstance(source, RowSource):
            return source.read_rows(expert, group)
        return ExpertRows.of(source.read(expert, group))
    except Exception as error:
        if not getattr(error, "__notes__", ()):
            error.add_note(f"while reading expert {expert} of {source.experts}")
        raise


def read_batch(source: WeightSource, experts: range, group: int) -> ExpertRows:
    """Several experts of any source, packed, experts first."""
    if isinstance(source, BatchSource):
        return source.read_batch(experts, group)
    return ExpertRows.stacked([read_rows(source, expert, group) for expert in experts])


def fetch(source: WeightSource, experts: range) -> None:
    """Tell a source that these experts, as far as it has them, will be read soon."""
    if isinstance(source, Fetching):
        for expert in experts[: max(0, source.experts - experts.start)]:
            source.fetch(expert)


def check(source: WeightSource) -> None:
    """Before what was made of a source is kept or run: has it stayed the same?"""
    if isinstance(source, Checkable):
        source.check()


def release(source: WeightSource) -> None:
    """Tell a source that the banks are complete."""
    if isinstance(source, Releasable):
        source.release()


def read_columns(source: WeightSource, expert: int, group: int, inner: range, outer: range) -> ExpertCodes:
    """`ColumnSource.read_columns`, of a source without it too."""
    if isinstance(source, ColumnSource):
        return source.read_columns(expert, group, inner, outer)

    def cut(codes: Codes, columns: range) -> Codes:
        part = slice(columns.start, columns.stop)
        return Codes(codes.codes[:, part], codes.zeros[:, part], codes.scales[:, part])

    whole = source.read(expert, group)
    return ExpertCodes(cut(whole.gate, inner), cut(whole.up, inner), cut(whole.down, outer))
