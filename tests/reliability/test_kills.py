"""Killed at a random moment: what is there afterwards is whole, and the next run leaves nothing of the last one behind.

`--kills N` is how often; `docs/reliability.md` has the numbers of a long run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sm70_moe import unfinished
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.cli.app import main
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import settings

SIZES = {"hidden": 256, "intermediate": 256, "experts": 24, "top_k": 4, "layers": 3, "group": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills") / "checkpoint"
    write_sample(folder, **SIZES, seed=0)
    return folder


def forked(run: Callable[[], Any]) -> int:
    """A process that does this, silently; its number. It has everything imported, so that moments are of the work."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        run()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def command(*arguments: object) -> Callable[[], None]:
    def run() -> None:
        sys.argv = ["sm70-moe", *map(str, arguments)]
        main()

    return run


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.monotonic()
    _, status = os.waitpid(forked(run), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return time.monotonic() - start


def killed(run: Callable[[], Any], after: float, by: signal.Signals = signal.SIGKILL) -> int:
    """How it ended: minus the signal, or its exit code where it was quicker."""
    child = forked(run)
    time.sleep(after)
    os.kill(child, by)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def moments(pytestconfig: pytest.Config, most: float) -> list[float]:
    source = random.Random(7)
    return [source.uniform(0, most) for _ in range(pytestconfig.getoption("--kills"))]


def test_prepare_is_killed(pytestconfig: pytest.Config, checkpoint: Path, tmp_path: Path) -> None:
    """A file with a bank's name is the one that an undisturbed run writes, to the byte."""
    whole = tmp_path / "whole"
    most = seconds_of(command("prepare", checkpoint, whole, "--tp", 2))
    wanted, left = contents(whole), 0
    for number, after in enumerate(moments(pytestconfig, most)):
        out = tmp_path / f"out{number % 5}"
        killed(command("prepare", checkpoint, out, "--tp", 2), after)
        found = contents(out) if out.exists() else {}
        left += sum(name.startswith(".") for name in found)
        assert {name: text for name, text in found.items() if not name.startswith(".")}.items() <= wanted.items()
        if number % 5 == 4:  # some folders are killed in several times
            seconds_of(command("prepare", checkpoint, out, "--tp", 2))
            assert contents(out) == wanted
    for out in tmp_path.glob("out*"):
        seconds_of(command("prepare", checkpoint, out, "--tp", 2))
        assert contents(out) == wanted
    print(json.dumps({"seconds of a run": round(most, 2), "unfinished files that kills left": left}))


def started(checkpoint: Path, cache: Path) -> list[MoELayer]:
    """What an engine does at its start, with a folder of prepared banks."""
    opened = Checkpoint.open(checkpoint)
    with AdmissionService(settings(SM70_MOE_CACHE=str(cache))) as service:
        facts = [opened.facts(layer, tensor_parallel=1, tensor_rank=0, device="cpu") for layer in opened.layers]
        return [
            service.layer(each, CheckpointSource(opened, layer, each))
            for each, layer in zip(facts, opened.layers, strict=True)
        ]


def answers(layers: list[MoELayer]) -> list[torch.Tensor]:
    x = torch.randn(5, SIZES["hidden"], generator=torch.Generator().manual_seed(1)).half()
    ids = torch.arange(20, dtype=torch.int32).view(5, 4) % SIZES["experts"]
    return [layer(x, ids, torch.full((5, 4), 0.25)) for layer in layers]


def test_a_cached_start_is_killed(pytestconfig: pytest.Config, checkpoint: Path, tmp_path: Path) -> None:
    """The next start has the same bits, and nothing unfinished stays in the folder."""
    whole = tmp_path / "whole"
    most = seconds_of(lambda: started(checkpoint, whole))
    names, wanted = sorted(contents(whole)), answers(started(checkpoint, whole))
    for number, after in enumerate(moments(pytestconfig, most)):
        cache = tmp_path / f"cache{number % 5}"
        killed(lambda cache=cache: started(checkpoint, cache), after)
        found = answers(started(checkpoint, cache))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert sorted(contents(cache)) == names
        if number % 2:
            for path in cache.iterdir():
                path.unlink()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_sample_is_killed(pytestconfig: pytest.Config, tmp_path: Path, by: signal.Signals) -> None:
    """There is a whole checkpoint or none; SIGTERM cleans up by itself, the next run after any other kill."""
    out = tmp_path / "out"
    run = command("sample", out, "--layers", 6)
    most = seconds_of(run)
    wanted = contents(out)
    for after in moments(pytestconfig, most):
        for path in (*out.glob("*"),):
            path.unlink()
        ended = killed(run, after, by)
        assert contents(out) in ({}, wanted)
        if by is signal.SIGTERM:
            assert ended in (143, 0, -signal.SIGTERM)  # the last before it could listen
            assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == [] or ended < 0
    for path in (*out.glob("*"),):
        path.unlink()
    seconds_of(run)
    assert contents(out) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    """A maker that lives keeps its folder, another thing's is not looked at, and a link leads nowhere."""
    other = tmp_path / f".other.{'a' * 32}.partial"
    other.mkdir()
    (tmp_path / f".it.{'b' * 32}.partial").mkdir()
    (tmp_path / f".it.{'c' * 32}.partial").symlink_to(other)
    with unfinished.folder(tmp_path, "it") as held:
        (held / "file").write_text("")
        unfinished.sweep(tmp_path, "it")
        assert (held / "file").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [other.name, held.name, f".it.{'c' * 32}.partial"]
        )
    assert not held.exists()
