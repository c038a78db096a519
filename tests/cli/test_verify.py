"""verify, sample, demo and doctor: they do what they print, and fail with exit codes that mean something."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from sm70_moe.kernels.portable.legacy import LegacyBackend

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


@pytest.mark.parametrize("rank", [0, 1])
def test_verify_a_real_checkpoint(command, rank: int) -> None:
    """Every admitted route of a checkpoint that AutoAWQ wrote keeps its bounds on both ranks."""
    ended = command("verify", TINY, "--tp", 2, "--rank", rank, "--layer", 1, "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert report["ok"] is True
    rows = {(r["route"], r["tokens"]) for r in report["results"]}
    assert rows == {("legacy", t) for t in (1, 2, 8, 9, 128)} | {("legacy_single_token", 1)}
    assert all(0 < r["w13"] <= 1 and 0 < r["w2"] <= 1 and r["finite"] and r["repeatable"] for r in report["results"])


def test_verify_prints_a_table(command) -> None:
    """The table has one line for each route and token count, none cut."""
    ended = command("verify", TINY, "--tokens", "1,2")
    lines = [line.split() for line in ended.out.splitlines()]
    assert [line[:3] for line in lines if line[-1:] == ["ok"]] == [
        ["legacy_single_token", "legacy", "1"],
        ["legacy", "legacy", "1"],
        ["legacy", "legacy", "2"],
    ]
    assert "bound fractions" in ended.out


def test_verify_exits_1_for_a_wrong_kernel(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is off by one part in 500 is caught."""
    right = LegacyBackend.run

    def wrong(self, banks, call, space=None) -> None:
        right(self, banks, call, space)
        call.out.mul_(1.002)

    monkeypatch.setattr(LegacyBackend, "run", wrong)
    ended = command("verify", TINY, "--tokens", "2")
    assert ended.code == 1
    assert "EXCEEDED" in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", "1,,2"), ("--tokens", "'1,,2'")),
        (("--tokens", "0"), ("--tokens", "'0'")),
        (("--tokens", "9000"), ("8192",)),
        (("--layer", "7"), ("no layer 7", "model.layers.0")),
        (("--tp", "2", "--rank", "2"), ("--rank 2",)),
        (("--tp", "8"), ("SHARD_CUTS_GROUP",)),
        (("--tp", "3"), ("SHARD_UNEVEN",)),
        (("--policy", "nothing"), ("nothing",)),
        (("--device", "tpu"), ("--device 'tpu'",)),
        (("--device", "cuda:99"), ("--device 'cuda:99'",)),
        (("--device", "hpu"), ("--device 'hpu'", "cpu")),
        (("--device", "meta"), ("--device 'meta'", "cpu")),
    ],
)
def test_verify_bad_input_exits_2(command, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """What cannot be verified is named, with exit code 2."""
    ended = command("verify", TINY, *arguments)
    assert ended.code == 2
    assert all(word in ended.err for word in words), ended.err


@pytest.mark.parametrize("name", ["verify", "demo"])
def test_running_kernels_without_torch_exits_2(command, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without torch the message names the extra to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    ended = command(*((name, TINY) if name == "verify" else (name,)))
    assert ended.code == 2
    assert "'.[torch]'" in ended.err


def test_verify_refuses_what_require_cannot_have(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit 1 without a native build stops, with all reasons on standard error."""
    monkeypatch.setenv("SM70_MOE_QPN_M1", "1")
    ended = command("verify", TINY, "--tp", 2)
    assert ended.code == 2
    assert "native build" in ended.err
    assert "device" in ended.err


def test_sample_then_explain_and_verify(command, tmp_path: Path) -> None:
    """A sample is a checkpoint like any other; the same seed gives the same bytes."""
    for name in ("one", "two"):
        assert command("sample", tmp_path / name, "--layers", 1, "--seed", 7).code == 0
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert "config.json" in files
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)
    assert command("explain", tmp_path / "one", "--tp", 2).code == 0
    assert command("verify", tmp_path / "one", "--tp", 2, "--tokens", "1,9").code == 0


def test_sample_of_a_policy_is_its_contract(command, tmp_path: Path) -> None:
    """--policy writes the whole geometry of the contract; a policy without one is an error."""
    assert command("sample", tmp_path / "own", "--policy", "sample-awq-tp2", "--layers", 1).code == 0
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (config["hidden_size"], config["moe_intermediate_size"]) == (256, 128)
    ended = command("sample", tmp_path / "generic", "--policy", "generic-awq")
    assert ended.code == 2
    assert not (tmp_path / "generic").exists()


def test_sample_never_overwrites(command, tmp_path: Path) -> None:
    """A folder with something in it is refused, and left as it was."""
    (tmp_path / "kept.txt").write_text("mine")
    ended = command("sample", tmp_path)
    assert ended.code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_sample_goes_where_a_link_leads(command, tmp_path: Path) -> None:
    """A link to an empty folder stays a link, and its folder is filled."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert command("sample", tmp_path / "link", "--layers", 1).code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").is_file()


@pytest.mark.parametrize("place", [".", "/proc/sample", "file/sample", "n" * 300])
def test_sample_names_a_place_that_cannot_be_written(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The current folder, no file system to write to, a file for a parent, a name too long: exit 2, nothing left."""
    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("a file")
    monkeypatch.chdir(tmp_path / "here")
    ended = command("sample", place if place[0] in "./" else tmp_path / place)
    assert ended.code == 2
    assert "error:" in ended.err
    assert list((tmp_path / "here").iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "here"]


def test_demo_runs_end_to_end(command) -> None:
    """The first thing a newcomer runs: it samples, explains and verifies, and ends well."""
    ended = command("demo")
    assert ended.code == 0
    for part in ("$ sm70-moe sample", "qpn_m1", "BUILD_MISSING", "legacy_single_token", "bound fractions"):
        assert part in ended.out


def test_doctor_reports_everything(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, devices, build, settings with sources, policies, what stops `1`, and V100 wheels."""
    monkeypatch.setenv("SM70_MOE_STRICT", "0")
    monkeypatch.setenv("SM70_MOE_QPN_M1", "0")
    report = json.loads(command("doctor", "--json").out)
    assert report["native_build"]["state"] == "no native build"
    assert {"setting": "SM70_MOE_STRICT", "value": "0", "source": "environment SM70_MOE_STRICT"} in report["settings"]
    states = {(row["flag"], row["state"], row["source"]) for row in report["flags"]}
    assert ("qpn_m1", "off", "environment SM70_MOE_QPN_M1") in states
    assert ("grouped_decode", "auto", "unset") in states
    assert {"generic-awq", "qwen3.8-flash-next-awq-tp4"} <= {p["name"] for p in report["policies"]}
    stops = {row["flag"]: row["stopped_by"] for row in report["require"] if row["outcome"] == "refused"}
    assert any("BUILD_MISSING" in line for line in stops["qpn_m1"])
    assert any(row["sm_70"] == "yes" for row in report["volta"])


def test_doctor_prints_tables(command) -> None:
    """Every part has its heading."""
    out = command("doctor").out
    for heading in ("Versions", "Devices", "Native build", "Settings", "Policies", "Torch wheels on a V100"):
        assert heading in out


def test_version(command) -> None:
    """The version command prints the package's version."""
    from sm70_moe import __version__

    assert command("version").out.strip() == __version__


def unquantised(folder: Path, *layers: int) -> Path:
    """The tiny checkpoint with plain weights in some layers."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(TINY, folder)
    path = folder / "model.safetensors"
    path.chmod(0o644)
    arrays = load_file(path)
    for layer in layers:
        for name in [n for n in arrays if f".layers.{layer}.mlp.experts." in n and n.endswith(".scales")]:
            matrix = name.removesuffix(".scales")
            rows, columns = arrays[f"{matrix}.qweight"].shape[0], arrays[name].shape[1]
            for kind in ("qweight", "qzeros", "scales"):
                del arrays[f"{matrix}.{kind}"]
            arrays[f"{matrix}.weight"] = np.zeros((columns, rows), np.float16)
    save_file(arrays, path)
    return folder


def test_verify_takes_the_first_layer_that_is_ours(command, tmp_path: Path) -> None:
    """A first layer that is not quantised is the engine's own: the next one is verified, and that is said."""
    folder = unquantised(tmp_path / "mixed", 0)
    ended = command("verify", folder, "--tokens", 1, "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["layer"] == "model.layers.1.mlp.experts"
    assert "model.layers.0.mlp.experts is not ours (format none)" in ended.err
    assert "model.layers.1.mlp.experts" in ended.err
    asked = command("verify", folder, "--tokens", 1, "--layer", 0)
    assert (asked.code, "FORMAT" in asked.err) == (2, True)


def test_verify_says_that_no_layer_is_ours(command, tmp_path: Path) -> None:
    """Nothing to verify is bad input, in words."""
    ended = command("verify", unquantised(tmp_path / "plain", 0, 1), "--tokens", 1)
    assert ended.code == 2
    assert "nothing to verify: model.layers.0.mlp.experts is not ours (format none), nor is any of 1 more" in ended.err
