"""What is sent in: complete, and nothing that tells whose machine it was."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.benchmark.anonymous import anonymous, own_names
from sm70_moe.benchmark.protocol import Protocol
from sm70_moe.benchmark.report import reported
from sm70_moe.benchmark.result import Result, load_result
from sm70_moe.benchmark.session import run
from sm70_moe.kernels.machinecode.census import Census

SMALL = Protocol(tokens=(1,), layers=2, banks=2, samples=7, captures=1, replays=1, warm=0)
NAMES = {"/home/ann lee": "<path>", "ann lee": "<user>", "box17": "<host>", "box17.example.org": "<host>"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/opt/x/cubins: no native build", "<path>: no native build"),
        ("found '/usr/lib/libcuda.so.1', expected one", "found '<path>', expected one"),
        ("in ~/.cache/torch of ann lee", "in <path> of <user>"),
        ("/home/ann lee/build and more", "<path> and more"),
        ("box17 said no, box17.example.org too", "<host> said no, <host> too"),
        ("box171 and joann lees", "box171 and joann lees"),
        (r"C:\Users\ann\x is there", "<path> is there"),
        ("octet32/4-byte/group-32/interleaved/batched", "octet32/4-byte/group-32/interleaved/batched"),
        ("800 GB/s at M = 1 / 2", "800 GB/s at M = 1 / 2"),
        ("BOX17 said no", "<host> said no"),
        ("GPU-7f3a1b2c-1234-abcd-9876-0123456789ab is lost", "<uuid> is lost"),
        ("GPU at 00000000:3B:00.0 fell off, 3b:00.0 too", "GPU at <bus> fell off, <bus> too"),
        ("0.5 at 4:3 or 12:30", "0.5 at 4:3 or 12:30"),
        ("box17", "box17"),
    ],
)
def test_texts_without_places_and_names(text: str, left: str) -> None:
    """Paths and names go; what looks a little like them stays. A single word is one of ours."""
    assert anonymous(text, NAMES) == left


def test_every_text_of_a_record_is_looked_at() -> None:
    """Wherever it stands; numbers and keys stay as they are."""
    record = {"a": ["see /tmp/x", {"b": "by ann lee"}], "n": 3, "f": 0.5, "none": None, "yes": True}
    left = {"a": ["see <path>", {"b": "by <user>"}], "n": 3, "f": 0.5, "none": None, "yes": True}
    assert anonymous(record, NAMES) == left


@pytest.fixture
def ann(monkeypatch: pytest.MonkeyPatch) -> None:
    """Her machine: whoever runs the tests may have no name, or no home."""
    monkeypatch.setenv("HOME", "/home/ann lee")
    monkeypatch.setenv("LOGNAME", "ann lee")
    monkeypatch.setattr(socket, "gethostname", lambda: "box17")
    monkeypatch.setattr(socket, "getfqdn", lambda: "box17.example.org")


def test_own_names(ann) -> None:
    """This machine's and this user's."""
    assert own_names() == NAMES


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: no entry for the user, no home or the root folder. A report is made all the same."""

    def nobody(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(nobody))
    assert "<path>" not in own_names().values()
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: Path("/")))
    assert anonymous("at M = 1 / 2") == "at M = 1 / 2"


def test_a_short_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts may have it without its domain."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node9.cluster.example")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node9.cluster.example")
    assert {"node9", "node9.cluster.example"} <= own_names().keys()
    monkeypatch.setattr(socket, "gethostname", lambda: "10.0.0.7")
    assert "10" not in own_names()


def test_a_folder_of_kernels_below_the_working_folder(rehearse) -> None:
    """It does not look like a path, but settings say that it is one."""
    stage = rehearse("sm_90", SM70_MOE_KERNELS="ann/own")
    told = f"{stage.plan.admission.settings.kernels}: no native build"  # settings mean the place, wherever one goes
    result = run(stage.plan, SMALL, stage.place, told, lambda what: None)
    text = json.dumps(reported(result, stage.plan, told))
    assert "<path>: no native build" in text
    assert "ann/own" not in text


@pytest.fixture
def result_and_stage(rehearse, monkeypatch: pytest.MonkeyPatch):
    stage = rehearse("sm_90", SM70_MOE_GROUPED_DECODE="0")
    found = Census("w13_1", "sm_90", 48, 0, 0, (8,), 440, {"HMMA.16816": 16}, {16: 4}, 0)
    monkeypatch.setattr("sm70_moe.benchmark.report.census", lambda code: (replace(found, kernel=code.decode()),))
    return run(stage.plan, SMALL, stage.place, stage.launcher, lambda what: None), stage


def test_what_is_in_it(result_and_stage, tmp_path: Path) -> None:
    """Samples, GPU, versions, build, policy, census of the versions that were used, self-tests, decisions."""
    result, stage = result_and_stage
    record = json.loads(json.dumps(reported(result, stage.plan, stage.launcher)))
    assert record["gpu"]["name"] == "fake GPU"
    assert {"sm70-moe", "python", "torch", "numpy", "cuda", "cuda-core"} <= record["versions"].keys()
    assert record["self_tests"]["qpn"] == ""
    assert record["state"]["before"] == {"sm_mhz": 1000, "held_down_by": []}
    refused = [d for d in record["decisions"] if d["feature"] == "grouped_decode"]
    assert [d["outcome"] for d in refused] == ["off"]
    assert [k["version"] for k in record["census"]] == [
        "roofline.sm_90.runtime",
        "decode_w13.sm_90.hidden256-intermediate64-top_k4-group32.4-byte.octet32.own",
        "decode_w2.sm_90.hidden256-intermediate64-top_k4-group32.4-byte.octet32.own",
        *(f"batch_{name}.sm_90.runtime" for name in ("plan", "sort")),
        "batch_product.sm_90.runtime.octet32.4-byte.own",
        "batch_sum.sm_90.runtime",
        "decode_fused.sm_90.hidden256-intermediate64-top_k4-group32.4-byte.own",
    ]
    assert record["census"][0]["registers"] == 48
    assert all(len(row["samples"]) == 7 for row in record["rows"])
    (tmp_path / "sent.json").write_text(json.dumps(record))
    assert load_result(tmp_path / "sent.json").rows == result.rows


def test_nothing_identifies(result_and_stage, ann) -> None:
    """Host, user, home, this checkout's folder and a device's serial number are nowhere in it."""
    result, stage = result_and_stage
    why = f"{Path(__file__)}: no native build for ann lee on box17, see /home/ann lee/x"
    skipped = tuple(replace(s, reason=why) for s in result.skipped)
    text = json.dumps(reported(replace(result, skipped=skipped), stage.plan, why))
    for secret in ("/home/ann", str(Path(__file__).parent), "ann lee", "box17"):
        assert secret not in text
    assert "no native build" in text
    assert not any(word in text.lower() for word in ("uuid", "serial", "hostname", "pci_bus"))


def test_without_a_build(result_and_stage) -> None:
    """The census is then the reason why there is none."""
    result, stage = result_and_stage
    assert isinstance(result, Result)
    assert reported(result, stage.plan, "no native build")["census"] == "no native build"
