"""Sinks beside the journal: told alike, dropped when they raise, never in the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from sm70_moe.admission.admit import Admission
from sm70_moe.policy import load_policy
from sm70_moe.record.sink import Sink, Sinks
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


@dataclass
class Kept:
    """Keeps what it is told; raises `error` from the call number `fails` on."""

    fails: int | None = None
    error: BaseException = field(default_factory=lambda: OSError("full"))
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def _note(self, kind: str, what: Any) -> None:
        self.calls.append((kind, what))
        if self.fails is not None and len(self.calls) >= self.fails:
            raise self.error

    def admitted(self, admission: Admission) -> None:
        self._note("admitted", admission.facts.layer)

    def event(self, name: str, level: str = "info", **fields: Any) -> None:
        self._note(name, (level, fields))

    def flush(self) -> None:
        self._note("flush", None)


def service(*sinks: Sink) -> AdmissionService:
    return AdmissionService(settings(), policy=FIRST, machine=fake_machine(), sinks=sinks)


def admit(made: AdmissionService, count: int) -> None:
    for index in range(count):
        made.admit(contract_facts(FIRST, f"model.layers.{index}.mlp.experts", index=index))


def test_a_sink_is_told_what_the_journal_is_told() -> None:
    """Every layer by itself, the summary, and the end; the journal goes on beside it."""
    kept = Kept()
    with capture_logs() as events, service(kept) as made:
        admit(made, 2)
    kinds = [kind for kind, _ in kept.calls if kind != "flush"]
    assert kinds == ["admitted", "admitted", "moe summary"]
    assert kept.calls[-1] == ("flush", None)
    assert {event["event"] for event in events} == {"moe decision", "moe summary"}


@pytest.mark.parametrize("error", [OSError("full"), ZeroDivisionError(), SystemExit(3)])
def test_a_sink_that_raises_is_told_of_once_and_dropped(error: BaseException) -> None:
    """Deciding goes on, the other sinks say so once, the broken one is not called again."""
    broken, kept = Kept(2, error), Kept()
    with capture_logs() as events, service(broken, kept) as made:
        admit(made, 4)
    assert len(made.plans()) == 4
    assert [kind for kind, _ in broken.calls] == ["admitted", "admitted"]
    assert [kind for kind, _ in kept.calls].count("admitted") == 4
    (told,) = [what for kind, what in kept.calls if kind == "moe sink"]
    assert (told[0], told[1]["sink"]) == ("error", "Kept")
    assert type(error).__name__ in told[1]["text"]
    assert [event["sink"] for event in events if event["event"] == "moe sink"] == ["Kept"]


def test_the_last_sink_that_breaks_is_told_of_by_structlog() -> None:
    """Nobody is left to tell it to but the host's log."""
    sinks = Sinks([Kept(1), Kept(1)])
    with capture_logs() as events:
        sinks.event("moe summary")
        sinks.event("moe summary")
        sinks.flush()
    assert [(event["event"], event["log_level"]) for event in events] == [("moe sink", "error")]
