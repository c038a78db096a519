"""`build-kernels DIR --cache`: what a checkpoint's layers would compile at their first start, ahead of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import Job
from sm70_moe.kernels.build import specialiser as specialiser_module
from sm70_moe.testing import fake_build

SIZES = {"hidden": 2560, "intermediate": 640, "experts": 512, "top_k": 10, "layers": 2, "group": 32, "seed": 7}
VERSIONS = {f"decode_{p}.sm_70.hidden2560-intermediate160-top_k10-group32.4-byte.octet32.own" for p in ("w13", "w2")}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two layers of the first contract's sizes, a build with kernels for any sizes, and a compiler that says yes."""

    def compile_now(wanted: Sequence[Job], headers: Mapping[str, str]) -> dict[str, bytes]:
        return {job.key: b"cubin" for job in wanted}

    def build(folder, backends, devices, specialiser):
        return replace(fake_build(), specialiser=specialiser)

    monkeypatch.setattr("sm70_moe.machine.probe.installed_build", build)
    monkeypatch.setattr(specialiser_module, "compiled", compile_now)
    monkeypatch.setattr(specialiser_module, "judged", lambda *_: ())
    monkeypatch.setattr(specialiser_module.nvrtc, "missing", lambda: "")
    monkeypatch.setenv("SM70_MOE_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SM70_MOE_COMPACT_METADATA", "0")
    write_sample(tmp_path / "model", **SIZES, data=False)
    return tmp_path / "model"


def fill(command, checkpoint: Path, *more: str):
    return command("build-kernels", checkpoint, "--cache", "--tp", 4, "--capability", "7.0", "--json", *more)


def test_filling(command, checkpoint: Path, tmp_path: Path) -> None:
    """Each version once, whatever the number of layers; a second run finds them there."""
    ended = fill(command, checkpoint)
    assert (ended.code, ended.err.count("compiled in")) == (0, 1)
    report = json.loads(ended.out)
    assert (report["folder"], set(report["compiled"]), report["kept"]) == (str(tmp_path / "cache"), VERSIONS, [])
    assert len([*(tmp_path / "cache").glob("*.kernel")]) == 2
    again = json.loads(fill(command, checkpoint).out)
    assert (again["compiled"], set(again["kept"])) == ([], VERSIONS)


def test_for_a_person(command, checkpoint: Path, tmp_path: Path) -> None:
    ended = command("build-kernels", checkpoint, "--cache", "--tp", 4, "--capability", "7.0")
    assert (ended.code, ended.out) == (0, f"2 versions compiled, 0 there before, in {tmp_path / 'cache'}\n")


def test_what_breaks_its_budget(command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, with the numbers: kernels for any sizes will run."""

    def judged(*_: object):
        raise BackendError("w2_1: registers 81, at most 80")

    monkeypatch.setattr(specialiser_module, "judged", judged)
    ended = fill(command, checkpoint)
    assert (ended.code, json.loads(ended.out)["refused"]) == (1, ["w2_1: registers 81, at most 80"])


def test_a_folder_that_cannot_be_written(command, checkpoint: Path, tmp_path: Path) -> None:
    """Exit 2: to keep them was the point."""
    (tmp_path / "cache").write_text("a file")
    ended = fill(command, checkpoint)
    assert ended.code == 2
    assert "Not a directory" in ended.err


@pytest.mark.parametrize(
    ("arguments", "variable", "named"),
    [
        (("--cache", "--capability", "7.0"), "0", "SM70_MOE_KERNEL_CACHE=0"),
        (("--cache", "--capability", "seven"), None, "--capability 'seven'"),
        (("--cache", "out", "--capability", "7.0"), None, "POLICY_FILE OUT, and DIR --cache"),
        ((), None, "POLICY_FILE OUT, and DIR --cache"),
    ],
)
def test_bad_input(
    command,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    variable: str | None,
    named: str,
) -> None:
    """Exit 2, and the thing is named."""
    if variable is not None:
        monkeypatch.setenv("SM70_MOE_KERNEL_CACHE", variable)
    ended = command("build-kernels", checkpoint, *arguments)
    assert ended.code == 2
    assert named in " ".join(ended.err.split())


def test_without_a_gpu_somebody_has_to_say_which(command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No guess."""
    monkeypatch.setattr("sm70_moe.cli.kernel_cache.cuda_devices", lambda _: ())
    ended = command("build-kernels", checkpoint, "--cache")
    assert ended.code == 2
    assert "--capability: this machine has no GPU" in ended.err


@pytest.mark.parametrize("without", ["build", "compiler"])
def test_nothing_to_compile_with(command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    """Exit 2: the name of what is missing."""
    if without == "build":
        monkeypatch.setattr("sm70_moe.machine.probe.installed_build", lambda *_, **__: None)
    monkeypatch.setattr(specialiser_module.nvrtc, "missing", lambda: "nvrtc: pip install it")
    ended = fill(command, checkpoint)
    assert ended.code == 2
    assert ("no native build" if without == "build" else "nvrtc: pip install it") in ended.err
