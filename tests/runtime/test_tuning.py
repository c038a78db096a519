"""Tuning: what is chosen, what is kept, which files are not trusted, and ranks that agree."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from sm70_moe.banks.banks import Banks
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import BackendError, Sm70MoeError
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.tactics import BUCKETS, RULE
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime import operator
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.runtime.tuned import KIND, SCHEMA, Key, TunedFile, file_in
from sm70_moe.runtime.tuning import choose
from sm70_moe.testing import fake_machine, settings
from sm70_moe.testing.fakes import FakeNative

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"
KEY = Key("NVIDIA H200", "0123abcd", "2560x160x512x10g32", 64)
OTHERS = ("t8.4x1.4x1", "t16.2x1.4x1")
OFFERED = (RULE, *OTHERS)
TIMES = {RULE: 9.0, OTHERS[0]: 7.0, OTHERS[1]: 7.0}


def timed(tactic: str) -> float:
    return TIMES[tactic]


def test_the_fastest_is_chosen() -> None:
    """The earlier of equals."""
    assert choose(OFFERED, timed) == (OTHERS[0], TIMES, {})


@pytest.mark.parametrize(("time", "chosen"), [(8.83, RULE), (8.81, OTHERS[0])])
def test_the_rule_stays_unless_something_is_clearly_faster(time: float, chosen: str) -> None:
    """Measurements differ by a few percent: ranks and starts must not flutter for that."""
    assert choose(OFFERED[:2], lambda tactic: 9.0 if tactic == RULE else time)[0] == chosen


def test_tactics_that_fail_are_left_out_and_named() -> None:
    """Without a time of the rule there is nothing to compare with."""

    def failing(*names: str) -> Callable[[str], float]:
        def measure(tactic: str) -> float:
            if tactic in names:
                raise BackendError(f"{tactic}: too much shared memory")
            return TIMES[tactic]

        return measure

    tactic, _, left_out = choose(OFFERED, failing(OTHERS[0]))
    assert (tactic, list(left_out)) == (OTHERS[1], [OTHERS[0]])
    tactic, times, left_out = choose(OFFERED, failing(RULE))
    assert (tactic, times, list(left_out)) == (RULE, {}, [RULE])


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def at(tmp_path: Path, warned: list[str]) -> Callable[[], TunedFile]:
    return lambda: TunedFile(tmp_path / "tuned.json", lambda path, text: warned.append(text))


def test_what_is_kept_holds_for_its_key_only(at: Callable[[], TunedFile], tmp_path: Path, warned: list[str]) -> None:
    """Device, kernels, sizes and bucket; not what is offered no more; readable by nobody but its writers."""
    at().keep(KEY, OTHERS[0])
    at().keep(replace(KEY, bucket=128), RULE)
    assert at().find(KEY, OFFERED) == OTHERS[0]
    assert at().find(replace(KEY, bucket=128), OFFERED) == RULE
    assert at().find(KEY, (RULE,)) is None
    for change in ({"device": "V100"}, {"images": "f"}, {"geometry": "other"}, {"bucket": 256}):
        assert at().find(replace(KEY, **change), OFFERED) is None
    assert not (tmp_path / "tuned.json").stat().st_mode & 0o022
    assert warned == []


def not_trusted() -> list[bytes]:
    return [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"kind": "something else", "schema": 1, "entries": {}}',
        json.dumps({"kind": KIND, "schema": SCHEMA + 1, "entries": {str(KEY): OTHERS[0]}}).encode(),
        json.dumps({"kind": KIND, "schema": SCHEMA, "entries": []}).encode(),
    ]


@pytest.mark.parametrize("content", not_trusted())
def test_files_that_are_not_trusted(
    at: Callable[[], TunedFile], tmp_path: Path, warned: list[str], content: bytes
) -> None:
    """Nothing is found, nothing is written, one warning, and the file is left as it was."""
    (tmp_path / "tuned.json").write_bytes(content)
    kept = at()
    for _ in range(2):
        assert kept.find(KEY, OFFERED) is None
        kept.keep(KEY, OTHERS[0])
    assert len(warned) == 1
    assert (tmp_path / "tuned.json").read_bytes() == content


def test_entries_of_another_kind_are_not_tactics(at: Callable[[], TunedFile], tmp_path: Path) -> None:
    """A number or a list in a tactic's place is not found."""
    record = {"kind": KIND, "schema": SCHEMA, "entries": {str(KEY): [OTHERS[0]]}}
    (tmp_path / "tuned.json").write_text(json.dumps(record))
    assert at().find(KEY, OFFERED) is None


def test_a_file_in_other_hands(at: Callable[[], TunedFile], tmp_path: Path, warned: list[str]) -> None:
    """Nobody waits for it."""
    with open(tmp_path / "tuned.json.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        at().keep(KEY, OTHERS[0])
    assert warned == ["another process holds it; tactics are measured anew and not kept"]
    assert not (tmp_path / "tuned.json").exists()


def test_files_that_others_may_write(at: Callable[[], TunedFile], tmp_path: Path, warned: list[str]) -> None:
    """Whoever may write it could choose for us; a link may lead anywhere."""
    at().keep(KEY, OTHERS[0])
    (tmp_path / "tuned.json").chmod(0o666)
    assert at().find(KEY, OFFERED) is None
    (tmp_path / "tuned.json").chmod(0o644)
    (tmp_path / "tuned.json").rename(tmp_path / "other.json")
    (tmp_path / "tuned.json").symlink_to(tmp_path / "other.json")
    assert at().find(KEY, OFFERED) is None
    tmp_path.chmod(0o777)
    assert at().find(KEY, OFFERED) is None
    assert ["others" in warned[0], "link" in warned[1], "folder" in warned[2]] == [True] * 3


def test_a_full_disk(at: Callable[[], TunedFile], warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once; nothing half is left."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept = at()
    kept.keep(KEY, OTHERS[0])
    kept.keep(KEY, OTHERS[0])
    assert len(warned) == 1
    assert "No space left" in warned[0]
    monkeypatch.undo()
    assert at().find(KEY, OFFERED) is None
    assert kept.path is not None
    assert [path.name for path in kept.path.parent.iterdir()] == ["tuned.json.lock"]


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the kernels that are compiled on this machine; nowhere where those are not kept either."""
    assert file_in(tmp_path) == tmp_path / "tuned.json"
    assert file_in(False) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert file_in(True) == tmp_path / "sm70-moe" / "kernels" / "tuned.json"


@dataclass(frozen=True, slots=True)
class FakeTuned(FakeNative):
    """A native backend with tactics, whose times are given; `other` has a tactic with other bits."""

    times: Mapping[str, float] = field(default_factory=dict)
    other: str = ""
    seen: list[tuple[int, str]] = field(default_factory=list, compare=False)
    taken: list[dict[int, str]] = field(default_factory=list, compare=False)

    def tactics(self, banks: Banks, top_k: int, tokens: int, dtype: str) -> tuple[str, ...]:
        return tuple(self.times)

    def timed(self, banks: Banks, call: Call, tactic: str, space: object) -> float:
        self.seen.append((call.tokens, tactic))
        call.out.fill_(2 if tactic == self.other else 1)
        return self.times[tactic]

    def take(self, banks: Banks, top_k: int, chosen: Mapping[int, str]) -> None:
        self.taken.append(dict(chosen))


def machine_with(**more: Any):  # type: ignore[no-untyped-def]  # a machine and its backend
    machine = fake_machine()
    plain = machine.backends["indexed"]
    fake = FakeTuned("indexed", plain.portable, times=TIMES, **more)  # type: ignore[union-attr]  # FakeNative
    return replace(machine, backends=MappingProxyType({**machine.backends, "indexed": fake})), fake


def layers_of(service: AdmissionService) -> list[MoELayer]:
    checkpoint = Checkpoint.open(TINY)
    facts = [checkpoint.facts(found, tensor_parallel=2, tensor_rank=0, device="cpu") for found in checkpoint.layers]
    facts = [replace(one, device="cuda:0") for one in facts]
    return [
        service.layer(one, CheckpointSource(checkpoint, found, one), device="cpu")
        for one, found in zip(facts, checkpoint.layers, strict=True)
    ]


def tuning(folder: Path, flag: str | None = "1", **more: Any):  # type: ignore[no-untyped-def]  # see below
    """A service with layers on a machine with tactics, and the backend that has them."""
    machine, fake = machine_with(**more)
    flags = {} if flag is None else {"tune_small_shapes": flag}
    asked = settings(flags, SM70_MOE_KERNEL_CACHE=str(folder), SM70_MOE_PROOF="0")
    service = AdmissionService(asked, machine=machine)
    return service, layers_of(service), fake


def test_layers_are_tuned_once_a_kind_and_their_plans_say_so(tmp_path: Path) -> None:
    """The choice is in the digest of every layer, its routes and the operator's; a second start measures nothing."""
    with capture_logs() as logs:
        service, layers, fake = tuning(tmp_path)
        before = {layer.plan.digest for layer in layers}
        handle = operator.register(layers[0])
        tuned = service.tune()
        assert len(layers) > 1
        assert fake.seen == [(bucket, tactic) for bucket in BUCKETS for tactic in OFFERED]
        assert fake.taken == [dict.fromkeys(BUCKETS, OTHERS[0])] * len(layers)
        assert [one.tactic for one in tuned] == [OTHERS[0]] * len(BUCKETS)
        (after,) = {layer.plan.digest for layer in layers}
        assert after not in before
        assert {plan.digest for plan in service.plans()} == {after}
        routes = {route.name: str(route) for route in layers[0].plan.routes}
        assert routes["grouped_batch"].endswith(f"tuned 16:{OTHERS[0]},32:{OTHERS[0]},64:{OTHERS[0]},128:{OTHERS[0]}")
        assert "tuned 128:" in routes["native_prefill"]
        assert "tuned" not in routes["native_decode"]
        with pytest.raises(BackendError, match="the graph was made for plan"):
            operator.find(handle, before.pop())
        again, others, second = tuning(tmp_path)
        again.tune()
        assert (second.seen, second.taken) == ([], fake.taken)
        assert {layer.plan.digest for layer in others} == {after}
    told = [log for log in logs if log["event"] == "moe tuning"]
    assert len(told) == 2 * len(BUCKETS)
    assert {log["log_level"] for log in told} == {"info"}
    assert "kept from before" in told[-1]["text"]


def test_off_by_default(tmp_path: Path) -> None:
    """Nothing is measured, nothing is kept, plans stay as they are."""
    with capture_logs() as logs:
        service, layers, fake = tuning(tmp_path, flag=None)
        digest = layers[0].plan.digest
        assert service.tune() == ()
        service.close()
    assert (fake.seen, fake.taken, layers[0].plan.digest) == ([], [], digest)
    assert list(tmp_path.iterdir()) == []
    assert not [log for log in logs if log["event"] == "moe tuning"]


def test_a_tactic_with_other_bits_is_not_taken(tmp_path: Path) -> None:
    """Whatever its time; it is told as a warning, with what was wrong."""
    with capture_logs() as logs:
        service, _, fake = tuning(tmp_path, other=OTHERS[0])
        assert {one.tactic for one in service.tune()} == {OTHERS[1]}
    told = [log for log in logs if log["event"] == "moe tuning"]
    assert {log["log_level"] for log in told} == {"warning"}
    assert "other bits" in told[0]["left_out"][OTHERS[0]]
    assert fake.taken[0] == dict.fromkeys(BUCKETS, OTHERS[1])


def test_never_while_capturing_and_never_for_frozen_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps the plan that it was captured under."""
    with capture_logs() as logs:
        service, layers, fake = tuning(tmp_path)
        service.close()
        with pytest.raises(Sm70MoeError, match="frozen"):
            service.tune()
        service, layers, fake = tuning(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for layer in layers:
            monkeypatch.setattr(type(layer.banks), "device", torch.device("cuda:0"))
        with pytest.raises(BackendError, match="captured"):
            service.tune()
    assert fake.seen == []
    assert "AdmissionService.tune was not called" in next(x["text"] for x in logs if x["event"] == "moe tuning")
