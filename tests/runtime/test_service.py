"""The service an engine embeds: read once, refuse in full, isolate, report drift."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sm70_moe.decision import Reason, Status
from sm70_moe.errors import AdmissionRefused, DriftError, PolicyError, SettingsError, Sm70MoeError
from sm70_moe.machine import probe as machine_module
from sm70_moe.plan.agreement import Lack, without
from sm70_moe.plan.speed import slow_tokens
from sm70_moe.policy import load_policy, parse_policy, policies_folder, shipped_policies
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.runtime.wants import wants_native
from sm70_moe.settings.settings import Settings
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
NATIVE_FLAGS = ("qpn_m1", "grouped_decode", "indexed_prefill")


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with capture_logs():
        yield


def facts(index: int = 0, **changes: object):
    return contract_facts(FIRST, f"model.layers.{index}.mlp.experts", index=index, **changes)


def test_admit_gives_a_plan_and_keeps_it() -> None:
    """The same facts give the same plan object; other facts under the same name are an error."""
    service = AdmissionService(settings(), machine=fake_machine())
    plan = service.admit(facts())
    assert plan.admission.policy.name == FIRST.name
    assert service.admit(facts()) is plan
    with pytest.raises(Sm70MoeError, match="other facts"):
        service.admit(facts(experts=256))


def test_refusal_carries_all_decisions_and_reasons() -> None:
    """The error lists every reason, names where the flag came from, and holds the decisions."""
    operator = settings(VLLM_SM70_AWQ_QWEN38_QPN_M1="1")
    service = AdmissionService(operator, machine=fake_machine(build="missing"))
    with pytest.raises(AdmissionRefused) as refused:
        service.admit(facts(checkpoint_group=128))
    text = str(refused.value)
    for part in ("VLLM_SM70_AWQ_QWEN38_QPN_M1", "expected 32, found 128", "native build", FIRST.name):
        assert part in text
    assert {d.feature for d in refused.value.decisions} >= {"qpn_m1", "legacy"}
    assert str(service.summary()).startswith("supported 0/1")


def test_summary_counts_layers() -> None:
    """One odd layer of three is told apart in the summary."""
    service = AdmissionService(settings(), machine=fake_machine())
    for index in range(3):
        service.admit(facts(index, checkpoint_group=128 if index == 1 else 32))
    summary = service.summary()
    assert (summary.layers, summary.supported) == (3, 3)
    assert summary.admitted["qpn_m1"] == 2
    assert "qpn_m1 2/3" in str(summary)


def test_unsupported_layer_is_no_error() -> None:
    """A layer that nothing can run gets a plan without routes, so that the engine still starts."""
    service = AdmissionService(settings(), machine=fake_machine())
    assert not service.admit(facts(bits=8)).supported


def test_two_services_do_not_see_each_other() -> None:
    """Flags and plans of one service leave another one alone."""
    one = AdmissionService(settings({"qpn_m1": "0"}), machine=fake_machine())
    two = AdmissionService(settings(), machine=fake_machine())
    assert not one.admit(facts()).admission.decision("qpn_m1").admitted
    assert two.admit(facts()).admission.decision("qpn_m1").admitted
    assert len(one.plans()) == len(two.plans()) == 1


def test_threads_share_one_plan_per_layer() -> None:
    """Eight threads that admit the same 16 layers end with 16 plans, each one object."""
    service = AdmissionService(settings(), machine=fake_machine())
    found: list[dict[str, int]] = []

    def work() -> None:
        found.append({f"{i}": id(service.admit(facts(i))) for i in range(16)})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(service.plans()) == 16
    assert len(found) == 8
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize(("off", "looked_up"), [(NATIVE_FLAGS, False), (NATIVE_FLAGS[:2], True), ((), True)])
def test_off_does_not_look_up_the_build(monkeypatch: pytest.MonkeyPatch, off: tuple[str, ...], looked_up: bool) -> None:
    """With every native flag at 0 the native build is not even looked for."""
    calls: list[None] = []
    monkeypatch.setattr(machine_module, "installed_build", lambda *_, **__: calls.append(None))
    operator = settings(dict.fromkeys(off, "0"))
    assert wants_native((FIRST,), operator) is looked_up
    AdmissionService(operator, policy=FIRST)
    assert bool(calls) is looked_up


def test_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit after the start changes no plan; drift names the variable and asks for a restart."""
    monkeypatch.setenv("SM70_MOE_QPN_M1", "1")
    service = AdmissionService(machine=fake_machine(), policy=FIRST)
    monkeypatch.setenv("SM70_MOE_QPN_M1", "nonsense")
    assert service.admit(facts()).admission.flags["qpn_m1"].state == "require"
    changed = [f for f in service.drift() if f.status is Status.FAIL]
    assert [(f.reason, f.expected, f.observed) for f in changed] == [(Reason.ENVIRONMENT_CHANGED, "1", "nonsense")]


def test_policy_file_drift(tmp_path: Path) -> None:
    """An edited, and then a deleted policy file are both reported."""
    path = tmp_path / "own.toml"
    shutil.copy(policies_folder() / f"{FIRST.name}.toml", path)
    service = AdmissionService(settings(), policy=str(path), machine=fake_machine())
    assert all(f.status is not Status.FAIL for f in service.drift())
    path.write_text(path.read_text().replace("revision = 3", "revision = 4"))
    assert [f.reason for f in service.drift() if f.status is Status.FAIL] == [Reason.POLICY_CHANGED]
    path.unlink()
    assert [f.observed for f in service.drift() if f.status is Status.FAIL] == [None]


def test_drift_raises_only_where_the_policy_says_so(tmp_path: Path) -> None:
    """With drift = "raise" closing admission fails; with "warn" it reports."""
    for word, raises in (("warn", False), ("raise", True)):
        path = tmp_path / f"{word}.toml"
        text = (policies_folder() / f"{FIRST.name}.toml").read_text()
        path.write_text(text.replace('drift        = "warn"', f'drift        = "{word}"'))
        service = AdmissionService(settings(), policy=str(path), machine=fake_machine())
        path.write_text(path.read_text().replace("revision = 3", "revision = 4"))
        if raises:
            with pytest.raises(DriftError) as error:
                service.close()
            assert [f.reason for f in error.value.findings] == [Reason.POLICY_CHANGED]
        else:
            service.close()


def test_closed_admission_takes_no_new_layer() -> None:
    """After close() known layers keep their plan; a new one is an error."""
    service = AdmissionService(settings(), machine=fake_machine())
    plan = service.admit(facts())
    service.close()
    assert service.admit(facts()) is plan
    with pytest.raises(Sm70MoeError, match="closed"):
        service.admit(facts(1))


def test_required_nowhere_is_refused_at_close() -> None:
    """Under admit-the-rest every layer may fall back, but not all of them together."""
    lenient = FIRST.model_copy(update={"on": FIRST.on.model_copy(update={"mixed_model": "admit-the-rest"})})
    service = AdmissionService(settings({"qpn_m1": "1"}), policy=lenient, machine=fake_machine())
    service.admit(facts(0, checkpoint_group=128))
    with pytest.raises(AdmissionRefused, match="qpn_m1"):
        service.close()
    other = AdmissionService(settings({"qpn_m1": "1"}), policy=lenient, machine=fake_machine())
    other.admit(facts(0, checkpoint_group=128))
    other.admit(facts(1))
    assert other.close().admitted["qpn_m1"] == 1


def test_a_required_flag_asks_for_one_layer_that_is_ours() -> None:
    """A layer without quantisation does not matter; a model of nothing else is refused when all were seen."""
    plain = {"format": "none", "packing": None, "bits": None, "zero_point": None, "checkpoint_group": None}
    service = AdmissionService(settings({"qpn_m1": "1"}), policy=FIRST, machine=fake_machine())
    assert service.admit(facts(0, **plain)).admission.foreign
    with pytest.raises(AdmissionRefused, match="qpn_m1") as caught:
        service.close()
    assert "format" in str(caught.value)
    mixed = AdmissionService(settings({"qpn_m1": "1"}), policy=FIRST, machine=fake_machine())
    mixed.admit(facts(0, **plain))
    mixed.admit(facts(1))
    assert mixed.close().admitted["qpn_m1"] == 1


def test_layers_that_stay_with_the_engine_are_counted_by_why() -> None:
    """They are neither native nor slow: nothing of ours runs them."""
    service = AdmissionService(settings(), policy=FIRST, machine=fake_machine())
    for index in range(3):
        service.admit(facts(index))
    service.leave(facts(1).layer, "nobody asked")
    service.leave(facts(2).layer, "nobody asked")
    with capture_logs() as events:
        summary = service.summary()
    assert (summary.native, summary.slow, summary.left) == (1, {}, {"nobody asked": 2})
    assert "native 1/3, left to the engine 2/3 (nobody asked)" in str(summary)
    (told,) = [event for event in events if event["event"] == "moe summary"]
    assert told["left"] == {"nobody asked": 2}


@pytest.mark.parametrize(
    ("most", "slow"),
    [(1, ""), (8, ""), (9, "9+ tokens"), (8192, "9+ tokens"), (None, "9+ tokens")],
)
def test_calls_that_an_engine_never_sends_are_not_slow(most: int | None, slow: str) -> None:
    """Up to the longest call, by routes that begin at or below it."""
    flags = {"grouped_batch": "0", "indexed_prefill": "0", "native_prefill": "0"}
    plan = AdmissionService(settings(flags), policy=FIRST, machine=fake_machine()).admit(facts(0))
    assert slow_tokens(plan, most) == slow


def test_the_summary_says_what_is_native_and_what_is_slow() -> None:
    """By the first route of every token count: decoding is native here, larger calls are not unless flags let them."""
    whole = AdmissionService(settings(), policy=FIRST, machine=fake_machine())
    assert slow_tokens(whole.admit(facts(0))) == ""
    assert (whole.summary().native, whole.summary().slow) == (1, {})
    flags = {"grouped_batch": "0", "indexed_prefill": "0"}
    service = AdmissionService(settings(flags), policy=FIRST, machine=fake_machine())
    service.admit(facts(0))
    service.admit(facts(1))
    with capture_logs() as events:
        summary = service.summary()
    slow = slow_tokens(service.plans()[0])
    assert slow not in ("", "all tokens")
    assert (summary.native, summary.slow) == (0, {slow: 2})
    assert f"portable 2/2 (slow: {slow})" in str(summary)
    (event,) = told(events, "moe summary")
    assert (event["log_level"], event["native"], event["slow"]) == ("warning", 0, {slow: 2})
    portable = AdmissionService(settings(), machine=fake_machine(build=None))
    assert slow_tokens(portable.admit(facts(0))) == "all tokens"


def test_a_required_flag_may_belong_to_other_layers_of_a_mixed_model() -> None:
    """Under admit-the-rest a layer of another policy does not refuse the flag, as long as one layer has it."""
    lenient = [
        p.model_copy(update={"on": p.on.model_copy(update={"mixed_model": "admit-the-rest"})})
        for p in shipped_policies()
    ]
    operator = settings(VLLM_SM70_AWQ_QWEN38_QPN_M1="1")
    for last, met in ((facts(1), True), (facts(1, hidden=1024), False)):
        service = AdmissionService(operator, policy=lenient[0], machine=fake_machine())
        service.policies = tuple(lenient)
        service.admit(facts(0, hidden=1024))
        service.admit(last)
        if met:
            assert service.close().admitted["qpn_m1"] == 1
        else:
            with pytest.raises(AdmissionRefused, match="VLLM_SM70_AWQ_QWEN38_QPN_M1"):
                service.close()


def test_unknown_variable_is_reported_and_strict_refuses() -> None:
    """A misspelt variable warns with the nearest name; strict mode refuses to start."""
    variables = {"SM70_MOE_QPN_M2": "1"}
    with capture_logs() as events:
        AdmissionService(settings(**variables), machine=fake_machine())
    (notice,) = [e for e in events if e["event"] == "moe settings"]
    assert "SM70_MOE_QPN_M1" in notice["text"]
    with pytest.raises(SettingsError, match="SM70_MOE_QPN_M2"):
        AdmissionService(settings(SM70_MOE_STRICT="1", **variables), machine=fake_machine())


def test_misspelt_policy_is_an_error() -> None:
    """A policy that does not exist is named."""
    with pytest.raises(PolicyError, match="qwen-next"):
        AdmissionService(settings(SM70_MOE_POLICY="qwen-next"), machine=fake_machine())


def test_policies_come_from_settings_or_geometry() -> None:
    """A named policy applies to every layer; without one the geometry chooses."""
    named = AdmissionService(settings(SM70_MOE_POLICY="generic-awq"), machine=fake_machine())
    assert named.admit(facts()).admission.policy.name == "generic-awq"
    chosen = AdmissionService(settings(), machine=fake_machine())
    assert chosen.admit(facts()).admission.policy.name == FIRST.name
    assert chosen.admit(facts(1, hidden=1024)).admission.policy.name == "generic-awq"
    assert len(chosen.policies) == len(shipped_policies())


def test_journal_is_complete_when_the_service_is_dropped(tmp_path: Path) -> None:
    """The last group is written when the service goes away without being closed."""
    path = tmp_path / "moe.jsonl"
    service = AdmissionService(Settings(journal=path), machine=fake_machine(), rank=1)
    service.admit(facts())
    del service
    records = [json.loads(line) for line in (tmp_path / "moe.rank1.jsonl").read_text().splitlines()]
    assert {r["feature"] for r in records} >= {"qpn_m1", "legacy"}


def test_an_injected_policy_does_not_drift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A policy that was handed over has no file to change; a relative path is found after chdir."""
    parsed = parse_policy((policies_folder() / "generic-awq.toml").read_text(), "<text>")
    service = AdmissionService(settings(), policy=parsed, machine=fake_machine())
    assert all(f.status is not Status.FAIL for f in service.drift())
    shutil.copy(policies_folder() / "generic-awq.toml", tmp_path / "own.toml")
    monkeypatch.chdir(tmp_path)
    service = AdmissionService(settings(), policy="./own.toml", machine=fake_machine())
    monkeypatch.chdir("/")
    assert all(f.status is not Status.FAIL for f in service.drift())


def test_agreed_plans_replace_the_services_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks fall back to is what the service keeps, runs and writes down."""
    service = AdmissionService(settings(), machine=fake_machine())
    plan = service.admit(facts())
    other = without(plan, [Lack(1, plan.layer, "qpn_m1")])
    monkeypatch.setattr("sm70_moe.runtime.service.agree", lambda plans, group, seconds: (other,))
    assert service.agree() == (other,)
    assert service.admit(facts()) is other
    assert service.summary().admitted["qpn_m1"] == 0


def told(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["event"] == name]


def test_a_change_is_told_once_until_it_changes_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five looks at one change are one event; another value, another variable and a relapse are news."""
    monkeypatch.setenv("SM70_MOE_QPN_M1", "1")
    steps = [
        ("SM70_MOE_QPN_M1", "0", 5),
        ("SM70_MOE_QPN_M1", "2", 2),
        ("SM70_MOE_GROUPED_DECODE", "0", 2),
        ("SM70_MOE_QPN_M1", "1", 1),
        ("SM70_MOE_QPN_M1", "2", 2),
    ]
    news: list[list[str]] = []
    with capture_logs() as events:
        service = AdmissionService(machine=fake_machine(), policy=FIRST)
        for name, value, looks in steps:
            before = len(told(events, "moe drift"))
            monkeypatch.setenv(name, value)
            for _ in range(looks):
                service.drift()
            news.append([f"{e['check']} {e['observed']}" for e in told(events, "moe drift")[before:]])
    qpn, grouped = "environment SM70_MOE_QPN_M1", "environment SM70_MOE_GROUPED_DECODE"
    assert news == [[f"{qpn} 0"], [f"{qpn} 2"], [f"{grouped} 0"], [], [f"{qpn} 2"]]


def test_what_was_told_is_not_told_again() -> None:
    """A refusal that is tried again, a file of the cache, a capture and a summary: each once."""
    with capture_logs() as events:
        service = AdmissionService(settings({"qpn_m1": "1"}), machine=fake_machine(), policy=FIRST)
        for group in (128, 128, 64):
            with pytest.raises(AdmissionRefused):
                service.admit(facts(checkpoint_group=group))
        plan = service.admit(facts(1))
        for _ in range(3):
            service._file_warning("moe cache", Path("bank"), "not used")
            service._captured(plan, 1, "qpn_m1")
            service.summary()
    refused = [event for event in told(events, "moe decision") if event["outcome"] == "refused"]
    assert [event["layers"] for event in refused] == ["0", "0"]
    assert [len(told(events, name)) for name in ("moe cache", "moe capture", "moe summary")] == [1, 1, 1]
