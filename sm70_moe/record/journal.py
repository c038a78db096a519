"""The record of what was decided: structlog events, and a JSONL file per rank.

structlog is used, never configured: the host application's configuration applies, also when it
comes later. Layers that are decided alike are one record with their range; none is written on the
hot path. An event is what an operator reads: outcome, flag, reasons; the line in the file has
every fact and finding as well. Both carry the decision's id.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from errno import EINVAL
from pathlib import Path
from stat import S_ISREG

from sm70_moe import opening
from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Decision, Outcome, Plain, obstacle_text, plain
from sm70_moe.errors import SettingsError
from sm70_moe.plan.layergroup import LayerGroup, gather
from sm70_moe.plan.plan import Plan, digest_of
from sm70_moe.plan.speed import speed_text
from sm70_moe.record.sink import say

LEVELS = {
    Outcome.ADMITTED: "info",
    Outcome.OFF: "info",
    Outcome.FELL_BACK: "warning",
    Outcome.REFUSED: "error",
    Outcome.NOT_OURS: "info",
    Outcome.UNSUPPORTED: "error",
}


def rank_path(path: Path, rank: int) -> Path:
    """The file of one rank: `{rank}` in the name is replaced, else ".rank0" stands before the suffix."""
    if not path.name or path.is_dir():
        raise SettingsError(f"SM70_MOE_JOURNAL={str(path)!r}: a folder; accepted is the path of a file")
    if path.exists() and not path.is_file():  # "/dev/null" for several ranks would make a file beside it
        raise SettingsError(f"SM70_MOE_JOURNAL={str(path)!r}: no regular file; accepted is the path of a file")
    if "{rank}" in path.name:
        return path.with_name(path.name.replace("{rank}", str(rank)))
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.jsonl'}")


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


MOST_OPEN = 16
"""Groups of alike layers that wait for more: a model has few kinds of layers, and a crash loses what waits."""


class Journal:
    """The sink that every service has: a record per decision, once a group of alike layers is complete.

    `path` is the setting; the file that is written is `rank_path(path, rank)`. Raises
    SettingsError at once if it cannot be opened for appending. Safe to use from several threads. An
    outlet that fails later (the file, or structlog) is given up with a word in the other one.
    """

    def __init__(self, path: Path | None = None, rank: int = 0, clock: Callable[[], str] = utc_now) -> None:
        self.rank, self.clock = rank, clock
        self.path = rank_path(path.absolute(), rank) if path is not None else None
        self._lock = threading.Lock()
        self._groups: list[LayerGroup] = []
        self._process = os.getpid()
        self._failed = self.path is None
        self._silent = False
        if self.path is not None:
            append(self.path, b"")
            append(self.path, end_of_last_line(self.path))

    def admitted(self, admission: Admission) -> None:
        """Take note of one admission; a refusal is written at once."""
        with self._lock:
            self._leave_to_parent()
            gather(self._groups, admission)
            if admission.refused or len(self._groups) > MOST_OPEN:
                self._write_groups()

    def event(self, name: str, level: str = "info", **fields: Plain) -> None:
        """Write one event of another kind: a notice at start, a summary, drift."""
        with self._lock:
            self._write_groups()
            self._write(name, level, {"time": self.clock(), "rank": self.rank, **fields})

    def flush(self) -> None:
        """Write the groups that are still open."""
        with self._lock:
            self._write_groups()

    def _leave_to_parent(self) -> None:
        """In a forked child: the groups that were open are its parent's, which writes it."""
        if self._process != os.getpid():
            self._process, self._groups = os.getpid(), []

    def _write_groups(self) -> None:
        self._leave_to_parent()
        groups, self._groups = self._groups, []
        for decision, record in (pair for group in groups for pair in decision_records(group)):
            whole = {"time": self.clock(), "rank": self.rank, **record}
            self._write("moe decision", LEVELS[decision.outcome], whole, brief(decision, whole))

    def _write(self, name: str, level: str, record: dict[str, Plain], event: dict[str, Plain] | None = None) -> None:
        self._say(name, level, record if event is None else event)
        self._append(name, record)

    def _say(self, name: str, level: str, fields: dict[str, Plain]) -> None:
        """A structlog event; once that has failed (a closed standard output, a broken processor) none follow."""
        failed = "" if self._silent else say(name, level, fields)
        if failed:
            self._silent = True
            text = f"structlog: {failed}; no more events follow"
            self._append("moe journal", {"time": self.clock(), "rank": self.rank, "text": text})

    def _append(self, name: str, record: dict[str, Plain]) -> None:
        """Write a line; a file that fails later on is given up with one event, since decisions must go on."""
        if self.path is None or self._failed:
            return
        line = json.dumps(plain({"event": name, **record}), separators=(",", ":"), allow_nan=False)
        try:
            append(self.path, line.encode(errors="replace") + b"\n")
        except SettingsError as error:
            self._failed = True
            self._say("moe journal", "error", {"rank": self.rank, "text": f"{error}; no more lines follow"})


def decision_records(group: LayerGroup) -> Iterator[tuple[Decision, dict[str, Plain]]]:
    """(decision, its record) of one group, plain JSON types only."""
    example = group.example
    shared: dict[str, Plain] = {
        "layers": group.numbers or list(group.layers),
        "first_layer": group.layers[0],
        "count": group.count,
        "policy": {"name": example.policy.name, "revision": example.policy.revision, "digest": example.policy.digest},
        "machine": example.machine.fingerprint,
        "facts": example.facts.record(),
        "plan": (plan := Plan(example)).digest,
        "runs": speed_text(plan),
    }
    for decision in example.decisions:
        verdict = decision.record()
        inputs = digest_of({**shared, "feature": decision.feature, "flag": decision.flag})
        yield decision, {"decision": inputs[:16], **verdict, **shared}


BRIEF = ("rank", "layers", "count", "feature", "outcome", "flag", "flag_source", "decision", "plan")


def brief(decision: Decision, record: dict[str, Plain]) -> dict[str, Plain]:
    """What an event says of a decision: no facts, and of the findings only those that stopped it."""
    stopped = "; ".join(f"{finding.check}: {obstacle_text(finding)}" for finding in decision.obstacles)
    reasons = [reason.name for reason in decision.reasons]
    return {**{key: record[key] for key in BRIEF}, "reasons": reasons, "text": stopped}


def end_of_last_line(path: Path) -> bytes:
    """What the file lacks to end with a whole line: a writer that was killed, or a full disk, cut it off."""
    try:
        with opening.opened(path) as file:
            if file.seek(0, os.SEEK_END) == 0:
                return b""
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"
    except OSError:  # one may be allowed to write and not to read
        return b""


FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def append(path: Path, line: bytes) -> None:
    """Append one line in a single write, so that lines of several writers never mix.

    Raises SettingsError naming the file if it cannot be written.
    """
    try:
        descriptor = os.open(path, FLAGS, 0o644)
        try:
            there = os.fstat(descriptor)
            if not S_ISREG(there.st_mode):  # a pipe may have no reader, and then block for ever
                raise OSError(EINVAL, "no regular file")
            before = there.st_size
            written = os.write(descriptor, line) if line else 0
            if written != len(line):
                os.ftruncate(descriptor, before)  # half a line would spoil the next one
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SettingsError(
            f"SM70_MOE_JOURNAL: cannot write {str(path)!r}: {error.strerror}; accepted: a file in a writable folder"
        ) from error
    if written != len(line):
        raise SettingsError(f"SM70_MOE_JOURNAL: only {written} of {len(line)} bytes fitted into {str(path)!r}")
