"""Whatever stands in the files, names and variables that a command is given: a terminal shows it and obeys nothing."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from safetensors.numpy import load_file, save_file

from sm70_moe.benchmark.result import Host, Result, Row, Skipped
from sm70_moe.cli import bench, output
from sm70_moe.kernels import registry
from sm70_moe.printable import printable
from sm70_moe.record import journal
from sm70_moe.testing import fake_machine

CLI = Path(output.__file__).parent
POLICIES = Path(__file__).parents[2] / "policies"
DATA = Path(__file__).parents[1] / "data"

HOSTILE = (
    "evil\x1b[2J\x1b]0;t\x07\rover\u202eright\u200bhidden\u2028sep\x9b31m\x7f\x08[red]x[/red]\nerror: forged\u2066"
)
"""Moves the cursor, sets colours and a title, rings, forges a line, turns the order round, hides, and is markup."""

NAME = HOSTILE.replace("\n", "\r\n").replace("/", "|")
"""The same for a name of a file or folder."""


def harmless(text: str, planted: bool = True) -> None:
    """Every line is what `printable` leaves of it, and none of them is the forged one."""
    lines = text.split("\n")
    assert [line for line in lines if printable(line) != line] == []
    assert [line for line in lines if line.lstrip().startswith("error: forged")] == []
    if planted:
        assert r"evil\x1b[2J" in text
        assert "[red]x" in text


@pytest.fixture
def planted(good: Path, tmp_path: Path) -> Path:
    """A checkpoint with the text wherever one can stand, under a folder of that name."""
    arrays = load_file(good / "model.safetensors")
    outer = HOSTILE.replace(".", "") + "."
    arrays |= {outer + name: value for name, value in arrays.items() if ".experts." in name}
    arrays |= {f"model.layers.0.mlp.experts.0.up_proj.{HOSTILE}": next(iter(arrays.values()))}
    save_file(arrays, good / "model.safetensors", {HOSTILE: HOSTILE})
    config = json.loads((good / "config.json").read_text())
    config |= {"model_type": HOSTILE, "hidden_act": HOSTILE, "architectures": [HOSTILE]}
    config["quantization_config"] |= {"modules_to_not_convert": [HOSTILE], "backend": HOSTILE, HOSTILE: HOSTILE}
    (good / "config.json").write_text(json.dumps(config))
    return good.rename(tmp_path / NAME)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables whose names and values have it."""
    monkeypatch.setenv(f"SM70_MOE_{HOSTILE}", HOSTILE)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy that is valid, with the text where text may stand."""
    text = (POLICIES / "sample-awq-tp2.toml").read_text()
    one_line = json.dumps(HOSTILE.replace("\n", "").replace("\r", ""), ensure_ascii=True).replace("\\u009b", "\\u009B")
    lines = [
        f"{key} = {one_line}" if (key := line.partition(" = ")[0].strip()) in TEXTS else line
        for line in text.splitlines()
    ]
    path = tmp_path / "planted.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def toml(text: str) -> str:
    """A string of TOML, which takes no DEL as it is."""
    return json.dumps(text).replace("\x7f", "\\u007f")


TEXTS = ("summary", "doc", "claim", "source", "limits")


@pytest.mark.parametrize(
    "arguments",
    [("explain",), ("explain", "--tp", 2, "--tokens", 3), ("inspect",), ("prepare", "OUT"), ("verify",)],
    ids=lambda given: given[0],
)
def test_a_checkpoint(command, planted: Path, named, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    """Names of tensors, config.json, the folder and the environment, told by every command that reads them."""
    name, *more = (tmp_path / f"{NAME}-out" if each == "OUT" else each for each in arguments)
    ended = command(name, planted, *more)
    assert ended.code in (0, 1, 2), ended.err
    harmless(ended.out + ended.err)


@pytest.mark.parametrize("arguments", [("explain", "--json"), ("inspect", "--json"), ("prepare", "OUT", "--json")])
def test_records(command, planted: Path, named, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    """JSON is ASCII, and still has the text as it was."""
    name, *more = (tmp_path / "out" if each == "OUT" else each for each in arguments)
    ended = command(name, planted, *more)
    harmless(ended.err, planted=False)
    assert ended.out.isascii()
    assert "\x1b" not in ended.out
    assert HOSTILE in json.dumps(json.loads(ended.out), ensure_ascii=False) or "evil\\u001b" in ended.out


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_checkpoint(command, planted: Path, name: str) -> None:
    """Errors name it too."""
    (planted / name).write_text(json.dumps({HOSTILE: HOSTILE}) + HOSTILE, errors="replace")
    ended = command("explain", planted)
    assert ended.code == 2
    harmless(ended.out + ended.err)
    assert ended.err.count("\n") == 1


def test_a_policy(command, policy: Path) -> None:
    """Every text of a valid one, and as the other side of a comparison."""
    for arguments in (("show", policy), ("check", policy), ("diff", policy, "generic-awq")):
        ended = command("policy", *arguments)
        assert ended.code == (1 if arguments[0] == "diff" else 0), ended.out + ended.err
        harmless(ended.out + ended.err, planted=arguments[0] != "check")


@pytest.mark.parametrize(
    "line",
    [
        "{key} = 1",
        "name = {text}",
        "[{key}]\nx = {text}",
        "[[route]]\nname = {text}\nbackend = {text}",
        "x = {text} {key}",
    ],
)
def test_a_wrong_policy(command, tmp_path: Path, line: str) -> None:
    """Keys, values and the file's own name; `policy check` tells on standard output, the others on standard error."""
    folder = tmp_path / NAME
    folder.mkdir()
    path = folder / "x.toml"
    path.write_text(line.format(key=toml(HOSTILE), text=toml(HOSTILE)) + "\n", encoding="utf-8")
    tiny = DATA / "tiny-qwen3-moe-awq"
    for arguments in (("policy", "check", path), ("policy", "show", path), ("explain", tiny, "--policy", path)):
        ended = command(*arguments)
        assert ended.code == 2
        harmless(ended.out + ended.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "show", HOSTILE),
        ("explain", HOSTILE),
        ("explain", ".", "--capability", HOSTILE),
        ("explain", ".", "--tp", HOSTILE),
        (HOSTILE,),
        ("explain", f"--{HOSTILE}"),
        ("predict", "--gpu", HOSTILE),
        ("predict", "--routing", HOSTILE),
        ("predict", "--fitted", HOSTILE),
        ("bench", "--tokens", HOSTILE),
        ("bench", "--request", HOSTILE),
        ("bench", "--json", f"{HOSTILE}/x"),
        ("build-kernels", f"{HOSTILE}.toml", "out"),
        ("kernels", HOSTILE),
        ("sample", HOSTILE, "--policy", HOSTILE),
        ("prepare", ".", "out", "--layers", HOSTILE),
        ("verify", ".", "--device", HOSTILE),
    ],
    ids=lambda given: " ".join(given[:3]).partition("evil")[0] or "nothing",
)
def test_arguments(command, arguments: tuple[str, ...]) -> None:
    """A shell's pattern may have put anybody's file names there."""
    ended = command(*arguments)
    assert ended.code == 2
    harmless(ended.out + ended.err, planted=False)


def test_variables(command, monkeypatch: pytest.MonkeyPatch, named) -> None:
    """Unknown names, values that are refused, and every setting as `doctor` has it."""
    ended = command("explain", DATA / "tiny-qwen3-moe-awq", "--tp", 2)
    assert ended.code == 0
    harmless(ended.err)
    assert command("explain", DATA / "tiny-qwen3-moe-awq", "--strict").code == 2
    for name in ("PROOF", "POLICY", "LAYER_DENYLIST", "QPN_M1", "ASSUME"):
        monkeypatch.setenv(f"SM70_MOE_{name}", HOSTILE)
        monkeypatch.setenv("SM70_MOE_STRICT", "1")
        ended = command("explain", DATA / "tiny-qwen3-moe-awq", "--tp", 2)
        assert ended.code == 2
        harmless(ended.out + ended.err)
        monkeypatch.delenv(f"SM70_MOE_{name}")


def test_doctor(command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named) -> None:
    """Devices, backends that do not load, versions, settings."""
    device = replace(fake_machine().devices[0], model=HOSTILE, unknown=HOSTILE)
    broken = registry.Broken("x", HOSTILE)
    machine = replace(fake_machine(), devices=(device,), backends=MappingProxyType({HOSTILE: broken}))
    monkeypatch.setattr("sm70_moe.cli.doctor.probe", lambda **_: machine)
    monkeypatch.setattr("sm70_moe.cli.doctor.installed_version", lambda _: HOSTILE)
    monkeypatch.setattr("sm70_moe.cli.doctor.torch_facts", lambda: {"state": HOSTILE})
    monkeypatch.setenv("SM70_MOE_CACHE", str(tmp_path / HOSTILE))
    ended = command("doctor")
    assert ended.code == 0, ended.err
    harmless(ended.out + ended.err)


def test_measurements(command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A result of somebody else's, and a fit."""
    result = json.loads((DATA / "prediction" / "h200-run9.json").read_text())
    for key in ("policy", "policy_digest", "build", "date", "source"):
        path = tmp_path / "run.json"
        path.write_text(json.dumps(result | {key: HOSTILE}))
        ended = command("predict", "--compare", path, "--kernels", DATA / "prediction" / "build")
        assert ended.code in (0, 1, 2), ended.err
        harmless(ended.out + ended.err, planted=False)
    for content in ({"schema": HOSTILE}, {HOSTILE: HOSTILE}, result | {"gpu": {"name": HOSTILE}}):
        path.write_text(json.dumps(content))
        for option in ("--compare", "--fitted"):
            ended = command("predict", option, path, "--kernels", DATA / "prediction" / "build")
            assert ended.code == 2
            harmless(ended.out + ended.err, planted=False)


def test_what_a_gpu_calls_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """The tables of `bench`."""
    made = {"launch": "plain", "part": "both", "metadata": "4-byte", "tokens": 1, "distinct": 1.0, "bytes": 1}
    row = Row.of([1.0] * 7, arm=HOSTILE, routing=HOSTILE, verdict=HOSTILE, shape=HOSTILE, layers=1, **made)
    left = Skipped(HOSTILE, HOSTILE, HOSTILE, "both", HOSTILE, 1, HOSTILE)
    host = (Host(1, HOSTILE, HOSTILE, 1.0, (1.0,)),)
    bench.show(Result({"name": HOSTILE}, HOSTILE, HOSTILE, HOSTILE, {}, {}, (row,), (left,), host))
    harmless(capsys.readouterr().out)


def test_builds(command, tmp_path: Path) -> None:
    """A folder of kernels: its record is somebody else's text."""
    folder = tmp_path / NAME
    folder.mkdir()
    good = {"schema": 1, "id": HOSTILE, "compiler": HOSTILE, "files": {HOSTILE: HOSTILE}, "images": []}
    scope = {"architectures": [HOSTILE], "geometries": [], "tests": False}
    for record in (good | {"scope": scope}, good | {"scope": HOSTILE}, {HOSTILE: HOSTILE}, {"schema": HOSTILE}):
        (folder / "BUILD.json").write_text(json.dumps(record))
        for arguments in (("kernels", folder), ("predict", "--kernels", folder)):
            ended = command(*arguments)
            assert ended.code in (0, 2), ended.err
            harmless(ended.out + ended.err, planted=False)


def test_events(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of the journal, which a command shows as a host would."""
    output.events_to_stderr()
    journal.Journal().event("moe weights", "error", layer=HOSTILE, text=HOSTILE, more=[HOSTILE, {HOSTILE: HOSTILE}])
    told = capsys.readouterr().err
    harmless(told, planted=False)  # the values of an event are shown as Python writes them, with the escapes escaped
    assert r"evil\\x1b[2J" in told


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being done, by name."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.progress(HOSTILE, 2) as bar:
        bar.at(1, text=HOSTILE)
    with output.status(HOSTILE) as said:
        said(HOSTILE)
    told = capsys.readouterr().err
    assert r"evil\x1b[2J" in told
    assert HOSTILE[:8] not in told
    assert "\u202e" not in told
    assert "\nerror: forged" not in told


WRITERS = {"echo", "secho", "print", "prompt", "confirm", "launch", "edit", "clear", "getLogger", "warn"}


OTHERS = [path for path in sorted(CLI.glob("*.py")) if path.name not in ("output.py", "streams.py")]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_nothing_is_printed_round_the_one_place(path: Path) -> None:
    """No module of the command line but `output` and `streams` knows how to write."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            assert not [n for n in names if n.partition(".")[0] in ("rich", "click", "logging", "warnings", "curses")]
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in WRITERS, f"{path.name}:{node.lineno}: {called}"
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__"):
            assert path.name == "ending.py", f"{path.name}:{node.lineno}: {node.attr}"
