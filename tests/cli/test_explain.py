"""explain: the table from headers alone, its exit codes, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sm70_moe.checkpoint.sample import write_sample

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


@pytest.fixture
def contract(tmp_path: Path) -> Path:
    """Headers of four layers of the first contract over empty files."""
    folder = tmp_path / "contract"
    write_sample(folder, hidden=2560, intermediate=640, experts=512, top_k=10, layers=4, group=32, seed=0, data=False)
    return folder


def test_first_contract(command, contract: Path) -> None:
    """On a V100 without a native build: every route with its verdict, and the memory of all layers."""
    ended = command("explain", contract, "--tp", 4, "--capability", "7.0", "--tokens", 1)
    assert ended.code == 0
    assert "model.layers.0-3.mlp.experts   4 layers   policy qwen3.8-flash-next-awq-tp4" in ended.out
    assert "BUILD_MISSING" in ended.out
    assert "a call of 1 token takes legacy_single_token" in ended.out
    assert "banks 1.39 GiB (3-byte metadata)" in ended.out


def test_json_is_complete(command, contract: Path) -> None:
    """The JSON form has facts, decisions, findings, layout, memory and the plan's digest."""
    ended = command("explain", contract, "--tp", 4, "--rank", 3, "--capability", "7.0", "--json", "--tokens", 8)
    (group,) = json.loads(ended.out)["groups"]
    assert group["count"] == 4
    assert group["route"] == "legacy"
    assert group["facts"]["tensor_rank"] == 3
    assert group["layout"] == "octet32/3-byte/group-32/interleaved/batched"
    assert {d["feature"]: d["outcome"] for d in group["decisions"]}["qpn_m1"] == "fell back"
    assert len(group["plan"]) == 64


def test_refused_size_names_numbers_and_alternatives(command, contract: Path) -> None:
    """At TP 8 a shard cuts the groups too finely: said with numbers; only --strict makes it exit 1."""
    ended = command("explain", contract, "--tp", 8)
    assert ended.code == 0
    assert "gcd(80, 32) = 16" in ended.out
    assert "tensor parallel 1, 2, 4" in ended.out
    assert command("explain", contract, "--tp", 8, "--strict").code == 1


def test_checkpoint_of_another_tool(command) -> None:
    """A checkpoint that AutoAWQ wrote is read with all of its facts known."""
    ended = command("explain", TINY, "--tp", 2, "--json")
    (group,) = json.loads(ended.out)["groups"]
    facts = group["facts"]
    assert (facts["hidden"], facts["intermediate"], facts["experts"], facts["top_k"]) == (256, 128, 16, 4)
    assert (facts["format"], facts["packing"], facts["checkpoint_group"], facts["zero_point"]) == (
        "awq",
        "gemm",
        32,
        True,
    )
    assert group["supported"] is True


def test_flags_of_the_environment_count(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag at 1 that cannot be honoured shows as refused; with --strict the command exits 1."""
    monkeypatch.setenv("SM70_MOE_QPN_M1", "1")
    ended = command("explain", TINY, "--tp", 2)
    assert ended.code == 0
    assert "refused" in ended.out
    assert "environment SM70_MOE_QPN_M1" in ended.out
    assert command("explain", TINY, "--tp", 2, "--strict").code == 1


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SM70_MOE_QPN_M1", "true", ("SM70_MOE_QPN_M1", "'true'", "0 and 1")),
        ("VLLM_SM70_AWQ_QWEN38_QPN_M1", "", ("VLLM_SM70_AWQ_QWEN38_QPN_M1", "''", "0 and 1")),
        ("SM70_MOE_LAYER_DENYLIST", "7-3", ("SM70_MOE_LAYER_DENYLIST", "7-3")),
        ("SM70_MOE_POLICY", "qwen-4", ("qwen-4",)),
    ],
)
def test_bad_settings_exit_2(
    command, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: tuple[str, ...]
) -> None:
    """A bad value is one message with name, value and what is accepted, and exit code 2."""
    monkeypatch.setenv(variable, value)
    ended = command("explain", TINY)
    assert (ended.code, ended.out) == (2, "")
    assert all(word in ended.err for word in words)


def test_unknown_variable_warns_and_strict_refuses(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable is a warning with the nearest name; --strict makes it an error."""
    monkeypatch.setenv("SM70_MOE_QPN_M2", "1")
    ended = command("explain", TINY)
    assert ended.code == 0
    assert "SM70_MOE_QPN_M1" in ended.err
    assert command("explain", TINY, "--strict").code == 2


@pytest.mark.parametrize(
    "arguments",
    [("--tp", "2", "--rank", "2"), ("--ep", "2", "--ep-rank", "5"), ("--capability", "7"), ("--capability", "7.x")],
)
def test_bad_options_exit_2(command, arguments: tuple[str, ...]) -> None:
    """Options out of range name themselves and what is accepted."""
    ended = command("explain", TINY, *arguments)
    assert ended.code == 2
    assert arguments[-2] in ended.err
    assert "accepted" in ended.err


def test_no_folder_exits_2(command, tmp_path: Path) -> None:
    """A folder that is not there is named."""
    ended = command("explain", tmp_path / "nowhere")
    assert ended.code == 2
    assert "nowhere" in ended.err


def test_explain_never_imports_torch(contract: Path) -> None:
    """With torch made impossible to import, explain works all the same."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['sm70-moe', 'explain', {str(contract)!r}, '--tp', '4']\n"
        "from sm70_moe.cli.app import main\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "qpn_m1" in ended.stdout


@pytest.mark.parametrize(
    ("capability", "options", "dtype", "noted"),
    [
        ("7.0", (), "float16", True),
        ("7.5", (), "float16", True),
        ("7.0", ("--dtype", "bfloat16"), "bfloat16", False),
        ("8.0", (), "bfloat16", False),
        ("9.0", ("--dtype", "float16"), "float16", False),
    ],
)
def test_the_engines_dtype(
    command, contract: Path, capability: str, options: tuple[str, ...], dtype: str, noted: bool
) -> None:
    """A declared BF16 is taken for FP16 where there are no tensor cores for it, and that is said."""
    config = json.loads((contract / "config.json").read_text())
    (key,) = {"dtype", "torch_dtype"} & config.keys()
    (contract / "config.json").write_text(json.dumps(config | {key: "bfloat16"}))
    ended = command("explain", contract, "--capability", capability, "--json", *options)
    assert ended.code == 0, ended.err
    groups = json.loads(ended.out)["groups"]
    assert {group["facts"]["activations"] for group in groups} == {dtype}
    assert ("bfloat16" in ended.err) is noted


def test_an_unknown_dtype_is_named(command, contract: Path) -> None:
    """Exit code 2, with what is accepted."""
    ended = command("explain", contract, "--dtype", "float8")
    assert ended.code == 2
    assert "--dtype 'float8'" in ended.err
