"""The journal: collapsed records of plain types, one file per rank, nothing configured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from sm70_moe.admission.admit import Admission, admit
from sm70_moe.errors import SettingsError
from sm70_moe.policy import load_policy
from sm70_moe.record.journal import Journal, rank_path
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def admission(index: int, **flags: str) -> Admission:
    facts = contract_facts(FIRST, f"model.layers.{index}.mlp.experts", index=index)
    return admit(FIRST, settings(flags), facts, fake_machine(build="missing"))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_alike_layers_are_one_record_per_decision(tmp_path: Path) -> None:
    """Four alike layers give one event and one line for each decision, with range and count."""
    with capture_logs() as events:
        journal = Journal(tmp_path / "moe.jsonl", rank=2, clock=lambda: "2026-01-01T00:00:00Z")
        for index in range(4):
            journal.admitted(admission(index))
        assert events == []
        journal.flush()
        journal.flush()
    written = lines(tmp_path / "moe.rank2.jsonl")
    assert len(written) == len(events) == len(admission(0).decisions)
    assert {(r["layers"], r["count"], r["rank"], r["time"]) for r in written} == {("0-3", 4, 2, "2026-01-01T00:00:00Z")}


def test_levels_follow_the_outcome(tmp_path: Path) -> None:
    """A fallback is a warning, a refusal an error, an admission information."""
    with capture_logs() as events:
        journal = Journal()
        journal.admitted(admission(0, grouped_decode="1"))
    levels = {e["feature"]: (e["outcome"], e["log_level"]) for e in events}
    assert levels["qpn_m1"] == ("fell back", "warning")
    assert levels["grouped_decode"] == ("refused", "error")
    assert levels["legacy"] == ("admitted", "info")
    assert levels["tune_small_shapes"] == ("off", "info")


def test_event_is_for_a_reader() -> None:
    """An event names reasons and what stopped the route, without facts and passed checks."""
    with capture_logs() as events:
        journal = Journal()
        journal.admitted(admission(0))
        journal.flush()
    event = next(e for e in events if e["feature"] == "qpn_m1")
    assert event["reasons"] == ["BUILD_MISSING"]
    assert "native build" in event["text"]
    assert "facts" not in event
    assert "findings" not in event


def test_record_says_everything(tmp_path: Path) -> None:
    """A record holds the inputs' hash, policy, machine, facts, flag with its source, findings, plan."""
    journal = Journal(tmp_path / "moe.jsonl")
    journal.admitted(admission(0))
    journal.flush()
    record = next(r for r in lines(tmp_path / "moe.rank0.jsonl") if r["feature"] == "qpn_m1")
    assert record["policy"] == {"name": FIRST.name, "revision": 3, "digest": FIRST.digest}
    assert (record["flag"], record["flag_source"], record["outcome"]) == ("auto", "unset", "fell back")
    assert record["facts"]["experts"] == 512
    assert {"decision", "time", "machine", "plan", "findings"} <= record.keys()


def test_refusal_is_written_at_once(tmp_path: Path) -> None:
    """What stops an engine is in the file before the error leaves."""
    journal = Journal(tmp_path / "moe.jsonl")
    journal.admitted(admission(0, qpn_m1="1"))
    assert any(r["outcome"] == "refused" for r in lines(tmp_path / "moe.rank0.jsonl"))


def test_structlog_configuration_of_the_host_applies(tmp_path: Path) -> None:
    """A host that configures structlog after this package was imported still decides the output."""
    seen: list[dict] = []

    def catch(_logger: object, _method: str, event: dict) -> dict:
        seen.append(event)
        raise structlog.DropEvent

    before = structlog.get_config()
    journal = Journal()
    journal.admitted(admission(0))
    structlog.configure(processors=[catch])
    try:
        journal.flush()
    finally:
        structlog.configure(**before)
    assert {event["event"] for event in seen} == {"moe decision"}


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    """Lines written from several threads stay whole."""
    journal = Journal(tmp_path / "moe.jsonl")
    threads = [
        threading.Thread(target=lambda: [journal.event("moe summary", text="x" * 500) for _ in range(50)])
        for _ in range(8)
    ]
    with capture_logs():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines(tmp_path / "moe.rank0.jsonl")) == 400


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a/j.jsonl", "a/j.rank3.jsonl"), ("j", "j.rank3.jsonl"), ("j-{rank}.log", "j-3.log")],
)
def test_one_file_for_each_rank(path: str, expected: str) -> None:
    """Ranks never share a file."""
    assert rank_path(Path(path), 3) == Path(expected)


def test_unwritable_path_is_an_error_at_start(tmp_path: Path) -> None:
    """A journal that cannot be written stops the start, and names the variable and the file."""
    with pytest.raises(SettingsError, match=r"SM70_MOE_JOURNAL.*missing"):
        Journal(tmp_path / "missing" / "moe.jsonl")


def test_a_disk_that_fills_up_later_stops_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails after the start is one error event; decisions go on, and no half line stays."""
    journal = Journal(tmp_path / "moe.jsonl")
    journal.admitted(admission(0))
    journal.flush()
    whole = (tmp_path / "moe.rank0.jsonl").read_text()
    real = os.write
    monkeypatch.setattr("os.write", lambda descriptor, line: real(descriptor, line[: len(line) // 2]))
    with capture_logs() as events:
        journal.admitted(admission(1))
        journal.admitted(admission(2, qpn_m1="0"))
        journal.flush()
    assert (tmp_path / "moe.rank0.jsonl").read_text() == whole
    assert [e["log_level"] for e in events if e["event"] == "moe journal"] == ["error"]
    assert sum(e["event"] == "moe decision" for e in events) == 2 * len(admission(0).decisions)


@pytest.mark.parametrize("path", [".", "/", "{folder}"])
def test_a_folder_is_no_journal(tmp_path: Path, path: str) -> None:
    """A folder's path is refused with the variable's name."""
    with pytest.raises(SettingsError, match="SM70_MOE_JOURNAL"):
        Journal(Path(path.format(folder=tmp_path)))


class Closed:
    """A standard output that somebody has closed."""

    def write(self, text: str = "") -> None:
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


def test_a_broken_standard_output_stops_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file gets every line, and one that says why no events follow."""
    monkeypatch.setattr("sys.stdout", Closed())
    structlog.configure()
    journal = Journal(tmp_path / "moe.jsonl")
    journal.admitted(admission(0))
    journal.flush()
    journal.event("moe summary", text="done")
    written = lines(tmp_path / "moe.rank0.jsonl")
    decisions = [r for r in written if r["event"] == "moe decision"]
    assert len(decisions) == len(admission(0).decisions)
    (told,) = [r for r in written if r["event"] == "moe journal"]
    assert told["text"].startswith("structlog: ")
    assert written[-1]["event"] == "moe summary"


def test_a_standard_output_that_was_never_there(tmp_path: Path) -> None:
    """A process started without one decides, ends as it wants to, and its file is whole (`prog >&-`)."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import structlog\n"
        "structlog.configure()\n"
        "import sm70_moe as sm\n"
        "from sm70_moe.testing import fake_machine\n"
        "settings, policy = sm.Settings(journal=Path(sys.argv[1])), sm.load_policy('generic-awq')\n"
        "with sm.AdmissionService(settings, policy=policy, machine=fake_machine()) as service:\n"
        "    service.admit(sm.LayerFacts(layer='l'))\n"
        "sys.exit(7)\n"
    )
    command = ["/bin/sh", "-c", 'exec "$0" -c "$1" "$2" >&-', sys.executable, code, str(tmp_path / "moe.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert {r["event"] for r in lines(tmp_path / "moe.rank0.jsonl")} == {"moe decision", "moe journal", "moe summary"}


def test_a_program_that_has_not_configured_structlog_prints_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its standard output is its own: events are records of `logging`, with their level and text, escaped."""
    journal = Journal()
    with caplog.at_level("INFO", "sm70_moe"):
        journal.admitted(admission(0))
        journal.event("moe weights", "warning", layer="model.layers.3", text="odd\x1b[2J")
        journal.event("moe warm-up", layers=2, calls=["1 qpn_m1"])
    assert capsys.readouterr().out == ""
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("WARNING", r"moe weights: odd\x1b[2J [model.layers.3]") in said
    level, text = next(pair for pair in said if pair[1].startswith("moe warm-up: "))
    assert level == "INFO"
    assert text.endswith("rank 0, layers 2, calls 1 qpn_m1")
    decisions = [text for _, text in said if text.startswith("moe decision: ")]
    assert len(decisions) == len(admission(0).decisions)
    assert any(text.startswith("moe decision: qpn_m1 fell back, layers 0") for text in decisions)


def test_a_records_values_are_plain_json_whatever_a_plug_in_gives(tmp_path: Path) -> None:
    """No value of an event stops the journal, and no line is anything but JSON."""
    journal = Journal(tmp_path / "moe.jsonl")
    journal.event("moe summary", odd=[float("nan"), Path("a"), b"b", {1: {2, 3}}, np.float32(0.5), np.int64(7)])
    (line,) = (tmp_path / "moe.rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["odd"] == ["nan", "a", "b'b'", {"1": ["2", "3"]}, 0.5, 7]
    assert "NaN" not in line


def test_a_relative_path_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes elsewhere keeps its file."""
    monkeypatch.chdir(tmp_path)
    journal = Journal(Path("moe.jsonl"))
    monkeypatch.chdir("/")
    journal.event("moe summary")
    assert [r["event"] for r in lines(tmp_path / "moe.rank0.jsonl")] == ["moe summary"]


def test_a_pipe_is_no_journal(tmp_path: Path) -> None:
    """With and without a reader: refused by name, and nobody waits."""
    path = tmp_path / "moe.rank0.jsonl"
    os.mkfifo(path)
    with pytest.raises(SettingsError, match=r"SM70_MOE_JOURNAL.*moe\.rank0\.jsonl"):
        Journal(tmp_path / "moe.jsonl")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(SettingsError, match="no regular file"):
            Journal(tmp_path / "moe.jsonl")
    finally:
        os.close(reader)


def test_a_forked_child_leaves_its_parents_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was open at the fork is its parent's to write; the child writes its own."""
    journal = Journal(tmp_path / "moe.jsonl")
    journal.admitted(admission(0))
    parent = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: parent + 1)  # the child: same memory, another process
    journal.flush()
    assert lines(tmp_path / "moe.rank0.jsonl") == []
    journal.admitted(admission(7, qpn_m1="0"))
    journal.flush()
    assert [r["layers"] for r in lines(tmp_path / "moe.rank0.jsonl") if r["feature"] == "qpn_m1"] == ["7"]


def test_a_fork_writes_each_decision_once(tmp_path: Path) -> None:
    """`admit`, `fork`, and both processes end in order: the open group stands once in the file."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "import sm70_moe as sm\n"
        "from sm70_moe.testing import fake_machine\n"
        "settings, policy = sm.Settings(journal=Path(sys.argv[1])), sm.load_policy('generic-awq')\n"
        "service = sm.AdmissionService(settings, policy=policy, machine=fake_machine())\n"
        "service.admit(sm.LayerFacts(layer='l'))\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n"
        "sys.exit(0)\n"
    )
    path = tmp_path / "moe.jsonl"
    subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=True)
    features = [r["feature"] for r in lines(tmp_path / "moe.rank0.jsonl")]
    assert features
    assert len(features) == len(set(features))


def test_a_line_that_was_cut_off_is_ended(tmp_path: Path) -> None:
    """A writer that was killed leaves half a record: the next one begins a line of its own, in every later run."""
    path = tmp_path / "moe.rank0.jsonl"
    path.write_bytes(b'{"event": "whole"}\n{"event": "mo')
    for name in ("first", "second"):
        Journal(tmp_path / "moe.jsonl", clock=lambda: "now").event(name)
    whole, half, *new = path.read_text().splitlines()
    assert (json.loads(whole)["event"], half) == ("whole", '{"event": "mo')
    assert [json.loads(line)["event"] for line in new] == ["first", "second"]


@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_no_file_gets_none_beside_it(tmp_path: Path, rank: int) -> None:
    """`/dev/null` is refused by name for every rank, and nothing is made in its folder; so is a pipe."""
    os.mkfifo(tmp_path / "pipe")
    for odd in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(SettingsError, match=str(odd)):
            Journal(odd, rank=rank)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert not list(Path("/dev").glob("null?*"))
