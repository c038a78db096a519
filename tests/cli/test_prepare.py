"""prepare: all ranks' banks in a folder; killed, it goes on where it was; what is damaged is made again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sm70_moe.checkpoint.sample import write_sample

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"
CLI = "from sm70_moe.cli.app import main; main()"

DIE_AT_THE_THIRD = """
import os, signal
from sm70_moe.banks import file as bankfile
header, calls = bankfile.header, []
def header_or_death(*arguments):
    calls.append(None)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return header(*arguments)
bankfile.header = header_or_death
"""
"""The process ends without a word while its third file is open and half written."""


def process(code: str, *more: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, more)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def partial(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".*") if path.name.endswith(".partial")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_every_rank_and_layer_gets_a_file(command, tmp_path: Path) -> None:
    """2 layers x 2 tensor-parallel x 3 expert-parallel ranks; a second run keeps them all as they are."""
    out = tmp_path / "out"
    ended = command("prepare", TINY, out, "--tp", 2, "--ep", 3, "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert (len(report["written"]), report["kept"], report["refused"]) == (12, [], {})
    assert sorted(report["written"]) == sorted(os.listdir(out))
    assert report["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = json.loads(command("prepare", TINY, out, "--tp", 2, "--ep", 3, "--json").out)
    assert (again["written"], sorted(again["kept"])) == ([], sorted(before))
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_verify_reads_what_prepare_wrote(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SM70_MOE_CACHE the weights are not read, and every route keeps its bounds."""
    assert command("prepare", TINY, tmp_path, "--tp", 2).code == 0
    monkeypatch.setenv("SM70_MOE_CACHE", str(tmp_path))

    def unread(*_: object) -> None:
        raise AssertionError("the banks are in the cache")

    monkeypatch.setattr("sm70_moe.reading.source.CheckpointSource.read_batch", unread)
    ended = command("verify", TINY, "--tp", 2, "--rank", 1, "--tokens", "1,9", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["ok"]


def test_some_layers(command, tmp_path: Path) -> None:
    """--layers chooses; a list without a layer, or malformed, is an error with exit code 2."""
    assert command("prepare", TINY, tmp_path, "--layers", "1").code == 0
    assert [path.name.split(".mlp")[0] for path in tmp_path.iterdir()] == ["model.layers.1"]
    for text in ("7", "1,,2"):
        ended = command("prepare", TINY, tmp_path, "--layers", text)
        assert ended.code == 2
        assert text in ended.err


def test_layouts_for_another_machine(command, tmp_path: Path) -> None:
    """--capability prepares what a V100 would read; the layout is in the file's name."""
    assert command("prepare", TINY, tmp_path, "--tp", 2, "--capability", "7.0", "--layers", "0").code == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cut_that_is_refused(command, tmp_path: Path) -> None:
    """TP 8 leaves 16 rows to a rank: exit code 1, the numbers, nothing written."""
    ended = command("prepare", TINY, tmp_path / "out", "--tp", 8)
    assert ended.code == 1
    assert "gcd(16, 32) = 16" in ended.err
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_experts(command, tmp_path: Path) -> None:
    """Files of ranks that have no expert are not written: exit code 2 that names both numbers."""
    ended = command("prepare", TINY, tmp_path / "out", "--ep", 1000)
    assert ended.code == 2
    assert "--ep 1000" in ended.err
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written(command, tmp_path: Path) -> None:
    """A file in the place of the folder: exit code 2 that names it."""
    (tmp_path / "file").write_text("mine")
    ended = command("prepare", TINY, tmp_path / "file")
    assert ended.code == 2
    assert str(tmp_path / "file") in ended.err
    assert (tmp_path / "file").read_text() == "mine"


def test_killed_in_the_middle_of_a_file(command, tmp_path: Path) -> None:
    """SIGKILL while the third of four files is written: the two whole ones are kept, the rest is made."""
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    dying = process(DIE_AT_THE_THIRD + CLI, "prepare", TINY, out, "--tp", 2)
    assert dying.wait(120) == -signal.SIGKILL
    assert len(partial(out)) == 1
    assert len(contents(out)) == 2
    report = json.loads(command("prepare", TINY, out, "--tp", 2, "--json").out)
    assert (len(report["kept"]), len(report["written"]), report["replaced"]) == (2, 2, {})
    assert partial(out) == []
    assert command("prepare", TINY, fresh, "--tp", 2).code == 0
    assert contents(out) == contents(fresh)


def test_killed_from_outside_at_any_time(command, tmp_path: Path) -> None:
    """SIGKILL as soon as a file is there: afterwards every file is whole, and the run is finished."""
    source, out, fresh = tmp_path / "source", tmp_path / "out", tmp_path / "fresh"
    write_sample(source, hidden=256, intermediate=128, experts=64, top_k=4, layers=6, group=32, seed=0)
    running = process(CLI, "prepare", source, out)
    while running.poll() is None and not (out.exists() and contents(out)):
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait(60)
    report = json.loads(command("prepare", source, out, "--json").out)
    assert len(report["kept"]) >= 1
    assert (len(report["kept"]) + len(report["written"]), report["replaced"]) == (6, {})
    assert command("prepare", source, fresh).code == 0
    assert contents(out) == contents(fresh)
    assert partial(out) == []


def test_a_flipped_bit_is_found_and_mended(command, tmp_path: Path) -> None:
    """The file is told by name and made anew; the others are kept."""
    out = tmp_path / "out"
    command("prepare", TINY, out, "--tp", 2)
    before = contents(out)
    victim = sorted(out.iterdir())[1]
    spoilt = bytearray(victim.read_bytes())
    spoilt[len(spoilt) * 3 // 4] ^= 8
    victim.write_bytes(spoilt)
    ended = command("prepare", TINY, out, "--tp", 2, "--json")
    report = json.loads(ended.out)
    assert ended.code == 0
    assert (report["written"], len(report["kept"]), list(report["replaced"])) == ([victim.name], 3, [victim.name])
    assert victim.name in ended.err
    assert contents(out) == before
