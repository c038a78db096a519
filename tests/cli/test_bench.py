"""bench: what it refuses before anything is measured, what it prints and writes, and a small run on a GPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.benchmark.result import Host, Result, Row, Skipped, load_result
from sm70_moe.cli import bench
from sm70_moe.cli.streams import OutputLost
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import probe
from sm70_moe.testing import fake_machine


def row(arm: str, microseconds: float, **changes: object) -> Row:
    values = {"launch": "plain", "part": "both", "metadata": "4-byte", "tokens": 1, "routing": "uniform"}
    values |= {"distinct": 10.0, "bytes": 7_680_000, "layers": 48, **changes}
    return Row.of([microseconds] * 7, arm=arm, **values)


DATA = Path(__file__).parents[1] / "data"
ROWS = (
    row("floor", 2.0, bytes=0),
    row("roofline", 6.5, shape="t128 s1 w200"),
    row("roofline", 6.9, shape="t512 s1 w160"),
    row("ours", 9.75, verdict="right"),
    row("ours", 5.5, part="w13"),
)
RESULT = Result(
    gpu={"name": "Tesla V100"},
    build="0123456789abcdef0123",
    policy="qwen3.8-flash-next-awq-tp4",
    policy_digest="668084cf",
    geometry={"hidden": 2560},
    protocol={"layers": 48},
    rows=ROWS,
    skipped=(
        Skipped("ours", "sm_70 has no dependent launch", "dependent", "both", "4-byte", 1, "uniform"),
        Skipped("ours", "sm_70 has no dependent launch", "dependent", "both", "4-byte", 2, "uniform"),
    ),
    host=(Host(1, "4-byte", "qpn_m1", 16.3, (16.3, 17.0)),),
)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Result], list[object]]:
    """on_gpu(result): a machine with a GPU on which that comes out; what was asked for is noted."""
    asked: list[object] = []

    def make(result: Result) -> list[object]:
        def measured(policy, facts, settings, machine, device, protocol, report):
            asked.append((policy.name, device, protocol) if facts is None else (policy.name, facts, protocol))
            return result, {"sent": True} if report else None

        monkeypatch.setattr(bench, "probe", lambda **_: fake_machine())
        monkeypatch.setattr(bench, "check_gpu", lambda device, machine: None)
        monkeypatch.setattr(bench, "measured", measured)
        return asked

    return make


def cpu_only(**_: object) -> Machine:
    return probe(devices=(), native=False)


def test_without_a_gpu(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, exit code 2, and nothing is written."""
    monkeypatch.setattr(bench, "probe", cpu_only)
    ended = command("bench", "--json", tmp_path / "x.json", "--report", tmp_path / "y.json")
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "'cuda:0'" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--tokens", "0"), "--tokens"),
        (("--tokens", "65"), "--tokens '65'"),
        (("--tokens", "1,2,1"), "tokens 1"),
        (("--metadata", ""), "''"),
        (("--metadata", "3-byte,3-byte"), "'3-byte'"),
        (("--routing", "uniform,uniform"), "'uniform'"),
        (("--layers", "1000000000"), "1000000000"),
        (("--samples", "1000000000"), "1000000000"),
        (("--json", "x.json", "--report", "./x.json"), "--json"),
        (("--policy", ""), "''"),
        (("--metadata", "5-byte"), "'5-byte'"),
        (("--routing", "zipf"), "'zipf'"),
        (("--samples", "3"), "at least 7"),
        (("--banks", "1"), "at least 2"),
        (("--json", "absent/x.json"), "--json absent/x.json"),
        (("--report", "."), "--report ."),
        (("--plot", "x.gif"), ".svg"),
        (("--policy", "nothing"), "nothing"),
        (("--policy", "generic-awq"), "hidden"),
        (("--device", "cpu"), "'cpu'"),
        (("--tp", "2"), "--tp 2"),
        (("--layer", "absent"), "absent"),
        (("--seconds", "0"), "seconds 0"),
        (("--device", "cuda:7"), "'cuda:7'"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(
    command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    """Exit code 2, the option or value named, nothing left in the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "probe", lambda **_: fake_machine())
    if "generic-awq" in arguments:
        monkeypatch.setattr(bench, "check_gpu", lambda device, machine: None)
        monkeypatch.setattr("sm70_moe.benchmark.place.Place.cuda", lambda device: None)
    ended = command("bench", *arguments)
    assert ended.code == 2
    assert word in ended.err
    assert list(tmp_path.iterdir()) == []


def test_plot_without_matplotlib(command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The extra is named before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = command("bench", "--plot", tmp_path / "x.png")
    assert ended.code == 2
    assert "'.[plot]'" in ended.err


def test_without_torch(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setattr(bench, "probe", lambda **_: fake_machine())
    monkeypatch.setitem(sys.modules, "torch", None)
    ended = command("bench")
    assert ended.code == 2
    assert "'.[torch]'" in ended.err


def test_a_flag_that_cannot_be_had(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """`1` fails closed here too, with every reason."""
    monkeypatch.setattr(bench, "probe", lambda **_: fake_machine(build="missing"))
    monkeypatch.setattr(bench, "check_gpu", lambda device, machine: None)
    monkeypatch.setattr("sm70_moe.benchmark.place.Place.cuda", lambda device: None)
    monkeypatch.setenv("SM70_MOE_FUSED_DECODE", "1")
    ended = command("bench")
    assert ended.code == 2
    assert all(word in ended.err for word in ("fused_decode", "SM70_MOE_FUSED_DECODE", "needs qpn_m1", "native build"))


def test_variables_that_nobody_knows(command, on_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that has the nearest name; an error in strict mode."""
    on_gpu(RESULT)
    monkeypatch.setenv("SM70_MOE_FUSED_DECOD", "1")
    ended = command("bench")
    assert ended.code == 0
    assert "SM70_MOE_FUSED_DECODE" in ended.err
    monkeypatch.setenv("SM70_MOE_STRICT", "1")
    assert command("bench").code == 2


def test_what_is_printed(command, on_gpu) -> None:
    """Times with ratios, the fastest roofline only, host time, and what was not run and why."""
    on_gpu(RESULT)
    ended = command("bench")
    assert ended.code == 0
    lines = [re.sub(r"\s+", " ", line).strip() for line in ended.out.splitlines()]
    assert "ours plain 9.75 1.50x" in lines
    assert "roofline plain 6.50 1.00x" in lines
    assert "ours plain w13 alone 5.50" in lines
    assert "6.90" not in ended.out
    assert "ours plain 4-byte 1 uniform 48 10.0 7.68 9.75 0.00 788 1.50 4.88 right" in lines
    assert any("16.3 us" in line and "qpn_m1" in line for line in lines)
    (skipped,) = [line for line in lines if line.startswith("not run:")]
    assert all(word in skipped for word in ("ours dependent", "M=1 uniform", "M=2 uniform", "no dependent launch"))


def test_what_is_written(command, on_gpu, tmp_path: Path) -> None:
    """JSON that can be read back, a report, and where to send it."""
    asked = on_gpu(RESULT)
    ended = command("bench", "--json", tmp_path / "x.json", "--report", tmp_path / "y.json", "--tokens", "1,8")
    assert ended.code == 0
    assert load_result(tmp_path / "x.json") == RESULT
    assert json.loads((tmp_path / "y.json").read_text()) == {"sent": True}
    assert "please send it" in ended.out
    (name, device, protocol) = asked[0]
    assert (name, device) == ("qwen3.8-flash-next-awq-tp4", "cuda:0")
    assert protocol.tokens == (1, 8)
    assert protocol.metadata == ("4-byte", "3-byte", "2.5-byte")


def test_four_bytes_without_a_report(command, on_gpu) -> None:
    """Other metadata where it is asked for."""
    asked = on_gpu(RESULT)
    command("bench")
    command("bench", "--metadata", "3-byte,4-byte", "--policy", "sample-awq-tp2")
    assert [one[2].metadata for one in asked] == [("4-byte",), ("3-byte", "4-byte")]
    assert asked[1][0] == "sample-awq-tp2"


def test_a_wrong_result_exits_1(command, on_gpu, tmp_path: Path) -> None:
    """The row is marked in the table and told in full; files are written all the same."""
    on_gpu(replace(RESULT, rows=(*ROWS, row("legacy", 900.0, verdict="wrong: 3 numbers were not written"))))
    ended = command("bench", "--json", tmp_path / "x.json")
    assert ended.code == 1
    assert "WRONG" in ended.out
    assert "3 numbers were not written" in ended.out
    assert json.loads((tmp_path / "x.json").read_text())["ok"] is False


def test_a_checkpoints_own_geometry(command, on_gpu, tmp_path: Path) -> None:
    """The sizes of the first layer that is read here, on a rank of --tp; the policy is the one that fits."""
    asked = on_gpu(RESULT)
    ended = command("bench", "--layer", DATA / "tiny-qwen3-moe-awq", "--tp", 2, "--seconds", 50)
    assert ended.code == 0, ended.err
    ((policy, facts, protocol),) = asked
    assert (facts.hidden, facts.intermediate_per_rank, facts.tensor_parallel, facts.device) == (256, 64, 2, "cuda:0")
    assert (policy, protocol.seconds) == ("sample-awq-tp2", 50.0)


def test_a_picture(command, on_gpu, tmp_path: Path) -> None:
    """Written in the format of its name."""
    pytest.importorskip("matplotlib")
    on_gpu(RESULT)
    assert command("bench", "--plot", tmp_path / "x.svg").code == 0
    assert (tmp_path / "x.svg").read_bytes().startswith(b"<?xml")


def test_files_are_written_first(command, on_gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader that closes the pipe does not cost the measurement; a full disk does not cost the table."""
    on_gpu(RESULT)
    ended = command("bench", "--report", tmp_path / "y.json", "--plot", tmp_path / "gone" / "x.svg")
    assert ended.code == 2
    monkeypatch.setattr(bench, "check_files", lambda *_: None)
    ended = command("bench", "--report", tmp_path / "y.json", "--json", tmp_path / "gone" / "x.json")
    assert ended.code == 2
    assert "9.75" in ended.out

    def closed(result: Result) -> None:
        raise OutputLost(BrokenPipeError())

    monkeypatch.setattr(bench, "show", closed)
    ended = command("bench", "--report", tmp_path / "z.json", "--json", tmp_path / "x.json")
    assert (ended.code, ended.err) == (141, "")
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "y.json", "z.json"}


@pytest.mark.gpu
def test_a_small_run_on_a_gpu(command, own_build, tmp_path: Path) -> None:
    """Every arm that this device has is timed, and everything that was judged is right."""
    small = ("--layers", 6, "--banks", 2, "--samples", 7, "--tokens", "1,2", "--metadata", "4-byte,3-byte")
    ended = command("bench", *small, "--json", tmp_path / "x.json", "--report", tmp_path / "y.json")
    assert ended.code == 0, ended.out + ended.err
    found = load_result(tmp_path / "x.json")
    assert {"separator", "floor", "roofline", "ours", "legacy"} <= {r.arm for r in found.rows}, found.skipped
    assert {r.verdict for r in found.rows if r.arm in ("ours", "fused", "legacy") and r.part == "both"} == {"right"}
    assert all(r.microseconds > 0 and len(r.samples) == 7 for r in found.rows)
    assert {h.tokens for h in found.host} == {1, 2}
    sent = load_result(tmp_path / "y.json")
    assert sent.rows == found.rows
    assert sent.gpu["name"] == found.gpu["name"]


@pytest.fixture
def own_build() -> None:
    """The build that this installation has counts; see the folder's conftest."""


def test_a_request_on_a_cpu(command, tmp_path: Path) -> None:
    """Small sizes run without a GPU; text and JSON say the same parts."""
    sizes = ("--request", "10,2", "--chunk", 8, "--layers", 2, "--device", "cpu", "--tp", 2)
    ended = command("bench", *sizes, "--layer", DATA / "tiny-qwen3-moe-awq", "--json", tmp_path / "x.json")
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "x.json").read_text())
    assert [(p["phase"], p["tokens"], p["calls"]) for p in found["parts"]] == [
        ("prompt", 8, 2),
        ("prompt", 2, 2),
        ("decode", 1, 4),
    ]
    assert found["microseconds"] > 0
    for part in found["parts"]:
        assert part["route"] in ended.out


@pytest.mark.parametrize(
    "wrong",
    [
        ("--request", "10"),
        ("--request", "a,b"),
        ("--request", "0,1"),
        ("--request", "8,1", "--chunk", 8193),
        ("--request", "8,1", "--report", "x.json"),
        ("--request", "8,1", "--layers", 2, "--json", "no/such/folder/x.json"),
    ],
)
def test_requests_that_are_refused(command, wrong: tuple[object, ...]) -> None:
    """Before anything is made."""
    assert command("bench", *wrong, "--device", "cpu").code == 2


@pytest.mark.gpu
def test_a_request_on_a_gpu(command, own_build, tmp_path: Path) -> None:
    """Prompts and decode steps are timed on the routes of the plan."""
    sizes = ("--request", "300,3", "--chunk", 256, "--layers", 4, "--banks", 2)
    ended = command("bench", *sizes, "--json", tmp_path / "x.json")
    assert ended.code == 0, ended.out + ended.err
    parts = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert [(p["phase"], p["tokens"], p["calls"]) for p in parts] == [
        ("prompt", 256, 4),
        ("prompt", 44, 4),
        ("decode", 1, 12),
    ]
    assert all(p["microseconds"] > 0 for p in parts)
