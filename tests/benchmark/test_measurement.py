"""Whole runs on a fake GPU: what is timed, checked, skipped and told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sm70_moe.benchmark.measurement import Findings, Limit, measure, measure_stand
from sm70_moe.benchmark.place import Place
from sm70_moe.benchmark.protocol import Protocol
from sm70_moe.benchmark.result import Row, Skipped
from sm70_moe.benchmark.session import run
from sm70_moe.cli.bench import measured
from sm70_moe.errors import BackendError
from sm70_moe.evidence.trial import Trial
from sm70_moe.timings import RIGHT, UNJUDGED

SMALL = Protocol(tokens=(1, 2), layers=4, banks=2, samples=7, captures=2, replays=1, warm=1)


def quiet(what: str) -> None:
    pass


def one_stand(stage, tokens: int = 2, protocol: Protocol = SMALL, **setup) -> Findings:
    """Every arm on one stand."""
    findings = Findings()
    measure_stand(stage.stand(stage.setup(**setup), tokens), protocol, stage.watch, findings, quiet, Limit())
    return findings


def verdicts(findings: Findings) -> dict[tuple[str, str, str], str]:
    return {(r.arm, r.launch, r.part): r.verdict for r in findings.rows}


ALL = {
    ("separator", "plain", "both"): UNJUDGED,
    ("floor", "plain", "both"): UNJUDGED,
    ("roofline", "plain", "both"): UNJUDGED,
    ("roofline", "dependent", "both"): UNJUDGED,
    ("roofline", "plain", "w13"): UNJUDGED,
    ("roofline", "plain", "w2"): UNJUDGED,
    ("ours", "plain", "both"): RIGHT,
    ("ours", "dependent", "both"): RIGHT,
    ("ours", "plain", "w13"): UNJUDGED,
    ("ours", "plain", "w2"): UNJUDGED,
    ("legacy", "plain", "both"): RIGHT,
}
"""Every arm but the one of a single launch, which is for one token."""


def test_every_arm_runs_and_is_right(rehearse) -> None:
    """On sm_90 all arms are timed, ours and torch are judged right; one launch is for one token."""
    findings = Findings()
    stage = rehearse("sm_90")
    measure(stage.setup(), SMALL, stage.watch, findings, quiet)
    cases = dict.fromkeys((r.tokens, r.routing) for r in findings.rows)
    assert list(cases) == [(1, "uniform"), (2, "uniform"), (2, "overlapping")]
    for tokens, routing in cases:
        rows = [r for r in findings.rows if (r.tokens, r.routing) == (tokens, routing)]
        found = {(r.arm, r.launch, r.part): r.verdict for r in rows}
        assert found == ALL | ({("fused", "plain", "both"): RIGHT} if tokens == 1 else {})
    assert {(s.arm, s.tokens) for s in findings.skipped} == {("fused", 2)}
    assert [(h.tokens, h.route) for h in findings.host] == [(1, "qpn_m1"), (2, "grouped_decode")]


@pytest.mark.parametrize("metadata", ["3-byte", "2.5-byte"])
def test_other_metadata(rehearse, metadata: str) -> None:
    """Banks, roofline and routes work with scales and zeros in planes of their own."""
    findings = one_stand(rehearse("sm_90"), metadata=metadata)
    assert verdicts(findings) == ALL
    assert {r.metadata for r in findings.rows} == {metadata}


def test_volta_has_no_dependent_launch(rehearse) -> None:
    """On sm_70 those arms are skipped with the reason, and everything else runs."""
    findings = one_stand(rehearse("sm_70"))
    assert verdicts(findings) == {key: value for key, value in ALL.items() if key[1] != "dependent"}
    told = {(s.arm, s.launch): s.reason for s in findings.skipped if s.launch == "dependent"}
    assert told.keys() == {("roofline", "dependent"), ("ours", "dependent")}
    assert all("sm_70" in reason and "sm_90" in reason for reason in told.values())


def test_dependent_launch_that_is_switched_off(rehearse) -> None:
    """A backend that was configured without it is not timed with it."""
    stage = rehearse("sm_90")
    backends = stage.plan.admission.machine.backends
    backends["grouped"] = backends["grouped"].configured(None, False)
    findings = one_stand(stage)
    assert ("ours", "dependent", "both") not in verdicts(findings)
    assert any(s.launch == "dependent" and "SM70_MOE_DEPENDENT_LAUNCH" in s.reason for s in findings.skipped)


def test_refused_routes_leave_roofline_and_torch(rehearse) -> None:
    """Flags at 0: the reasons are kept, the read-only kernels and torch are timed."""
    findings = one_stand(rehearse("sm_90", SM70_MOE_GROUPED_DECODE="0"))
    assert {r.arm for r in findings.rows} == {"separator", "floor", "roofline", "legacy"}
    told = {s.reason for s in findings.skipped}
    assert len(told) == 1
    assert "grouped_decode" in told.pop()


def test_without_any_kernel_torch_is_timed(rehearse) -> None:
    """No build: two copies separate the layers, and every other arm says why it was not run."""
    stage = rehearse("sm_90", SM70_MOE_GROUPED_DECODE="0")
    result = run(stage.plan, replace(SMALL, tokens=(2,)), stage.place, "no native build", quiet)
    assert {r.arm for r in result.rows} == {"separator", "legacy"}
    assert result.protocol["separator"] == "copies"
    assert {s.reason for s in result.skipped if s.arm in ("floor", "roofline")} == {"no native build"}
    assert result.ok


def test_a_wrong_result_is_seen(rehearse) -> None:
    """A kernel that is off by one part in 100 gives a row that says so, and a run that is not ok."""
    stage = rehearse("sm_90")
    stage.kernels.spoil = lambda out: out.mul_(1.01)
    findings = one_stand(stage)
    bad = {(r.arm, r.launch, r.part) for r in findings.rows if r.wrong}
    assert bad == {("ours", "plain", "both"), ("ours", "dependent", "both")}
    assert findings.wrong


def test_numbers_that_were_not_written_are_seen(rehearse) -> None:
    """Outputs hold NaN before: a kernel that skips a row is found out."""
    stage = rehearse("sm_90")
    stage.kernels.spoil = lambda out: out[-1].fill_(float("nan"))
    assert any(r.wrong and "256" in r.verdict for r in one_stand(stage).rows if r.arm == "ours")


def test_other_bits_in_a_graph_are_seen(rehearse) -> None:
    """What is replayed must have the bits of the same call by itself."""
    stage = rehearse("sm_90")
    calls = iter(range(10**6))
    stage.kernels.spoil = lambda out: out.view(torch.int16).add_(next(calls) % 2)
    assert any("bits" in r.verdict or "repeatable" in r.verdict for r in one_stand(stage).rows if r.wrong)


def test_what_cannot_be_captured(rehearse) -> None:
    """Torch is timed eagerly, and its row says so; any other arm is skipped with the first line of the error."""
    stage = rehearse("sm_90")
    stage.watch.refuses = True
    findings = one_stand(stage)
    assert [(r.arm, r.launch, r.verdict) for r in findings.rows] == [("legacy", "eager", RIGHT)]
    assert {s.reason for s in findings.skipped if s.arm == "separator"} == {
        "operation not permitted when stream is capturing"
    }


def test_the_fastest_shape_is_used_for_the_parts(rehearse) -> None:
    """Parts and dependent launch of the roofline take the shape that was fastest, and it is what ratios use."""
    stage = rehearse("sm_90")
    times = iter([*[500.0] * 14, *[100.0 * n for n in (9, 9, 2, 9, 9, 9, 9, 9, 9) for _ in range(7)], *[900.0] * 10**4])
    stage.watch.microseconds = lambda: next(times)
    rows = [r for r in one_stand(stage).rows if r.arm == "roofline"]
    whole: list[Row] = [r for r in rows if (r.launch, r.part) == ("plain", "both")]
    assert {r.shape for r in rows if r not in whole} == {whole[2].shape}
    assert whole[2].microseconds == 200.0 / 4


def test_a_run_as_a_whole(rehearse) -> None:
    """Banks by free memory, state of the device, host times; `run` tells what it is at."""
    stage, told, looks = rehearse("sm_90"), [], []

    def state() -> dict:
        looks.append(1)
        return {"sm_mhz": 1000, "held_down_by": ["power cap (software)"] if len(looks) == 2 else []}

    protocol = replace(SMALL, tokens=(1,), banks=None)
    result = run(stage.plan, protocol, replace(stage.place, state=state), stage.launcher, told.append)
    assert result.ok
    assert result.protocol["banks"] == {"4-byte": 12}
    assert result.extra["state"]["held_down_by"] == ["power cap (software)"]
    assert result.policy == "sample-awq-tp2"
    assert result.geometry == {"hidden": 256, "intermediate": 64, "experts": 16, "top_k": 4, "group": 32}
    assert any("ours plain" in what for what in told)


def test_what_the_command_measures(rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """From policy to result and report, on the place that the device is."""
    stage = rehearse("sm_90")
    monkeypatch.setattr(Place, "cuda", staticmethod(lambda device: stage.place))
    monkeypatch.setattr("sm70_moe.benchmark.report.versions", dict)
    admission = stage.plan.admission
    protocol = replace(SMALL, tokens=(1,), layers=2)
    result, sent = measured(admission.policy, None, admission.settings, admission.machine, "cuda:0", protocol, True)
    assert result.ok
    assert {"separator", "floor", "roofline", "ours", "fused", "legacy"} == {r.arm for r in result.rows}
    assert len(sent["rows"]) == len(result.rows)
    assert {"decisions", "self_tests", "census", "state"} <= sent.keys()


def test_too_little_memory(rehearse) -> None:
    """Less than two banks: what is free and what is needed, before anything is measured."""
    stage = rehearse("sm_90")
    place = replace(stage.place, free=lambda: 2**30)
    with pytest.raises(BackendError, match=r"1\.00 GiB"):
        run(stage.plan, SMALL, place, stage.launcher, quiet)
    assert stage.driver.launched == []


def test_an_error_of_the_device_ends_one_kind_only(rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks outside of an arm is told, and the result is still there."""
    stage = rehearse("sm_90")

    def broken(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nadvice")

    monkeypatch.setattr("sm70_moe.benchmark.session.measure", broken)
    result = run(stage.plan, SMALL, stage.place, stage.launcher, quiet)
    assert not result.ok
    assert result.skipped == (
        Skipped("everything else", "CUDA error: an illegal memory access was encountered", metadata="4-byte"),
    )


def test_nothing_new_is_begun_after_the_time(rehearse) -> None:
    """Making weights counts; what was measured stays, the rest is named with the reason."""
    stage = rehearse("sm_90")
    seen: list[str] = []
    now = iter(range(1000))
    limit = Limit(seconds=9.5, start=0.0, clock=lambda: float(next(now)))
    findings = Findings()
    measure(stage.setup(), SMALL, stage.watch, findings, seen.append, limit)
    assert len(findings.rows) == 10  # at seconds 0 to 9
    assert {one.reason for one in findings.skipped} == {"no time left of 9.5 s"}
    assert {one.arm for one in findings.skipped} >= {"ours", "legacy", "host time"}


def test_a_run_without_time(rehearse) -> None:
    """Not even weights are made."""
    stage = rehearse("sm_90")
    result = run(stage.plan, replace(SMALL, seconds=1e-9), stage.place, stage.launcher, quiet)
    assert (result.rows, [one.arm for one in result.skipped]) == ((), ["everything else"])


def test_equal_bits_are_judged_once(rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and dependent launch give the same output: the reference decodes its experts for one of them."""
    stage, judged = rehearse("sm_90"), []
    original = Trial.judge
    monkeypatch.setattr(Trial, "judge", lambda self, call: judged.append(self.route) or original(self, call))
    found = verdicts(one_stand(stage))
    assert {arm for arm, verdict in found.items() if verdict == RIGHT} == {
        ("ours", "plain", "both"), ("ours", "dependent", "both"), ("legacy", "plain", "both")
    }  # fmt: skip
    assert judged == ["ours"]  # the fake's kernels are the portable arithmetic: `legacy` has the same bits
