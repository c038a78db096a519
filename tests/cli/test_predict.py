"""`predict`, on a build that stays as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.machinecode.census import Census
from sm70_moe.kernels.machinecode.elf import Cubin
from sm70_moe.kernels.native.launch import Step
from sm70_moe.policy import load_policy
from sm70_moe.prediction.readbuild import ReadBuild, steps_of
from sm70_moe.prediction.work import Call

FIRST = "qwen3.8-flash-next-awq-tp4"
DATA = Path(__file__).parents[1] / "data" / "prediction"
BUILD, RUN = DATA / "build", DATA / "h200-run9.json"
ONE_LAUNCH = DATA / "one-launch" / "build"


def frozen_steps(call: Call, architecture: str) -> tuple[Step, ...]:
    """What was launched for the first contract when the build was kept; the sources have gone on since."""
    steps = json.loads((DATA / "steps.json").read_text())
    if str(call.tokens) not in steps:
        return steps_of(call, architecture)
    axes = {"metadata": str(call.metadata), "order": "octet32"}
    return tuple(Step(source, kernel, grid=tuple(grid), axes=axes) for source, kernel, grid in steps[str(call.tokens)])


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the kept build have its own manifests and steps."""
    real = ReadBuild.open

    def opened(folder: Path | None, architecture: str) -> ReadBuild:
        if folder == ONE_LAUNCH:
            return replace(real(folder, architecture), manifests=load_manifests(folder.parent / "manifests"))
        return replace(real(folder, architecture), manifests=load_manifests(DATA / "manifests"), steps=frozen_steps)

    monkeypatch.setattr(ReadBuild, "open", opened)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fitted") / "made.json"


@pytest.fixture
def fitted(command, numbers: Path) -> Path:
    """Numbers fitted by the command itself, once."""
    if not numbers.exists():
        ended = command("predict", "--kernels", BUILD, "--fit", RUN, numbers)
        assert ended.code == 0, ended.err
        assert "43 rows of NVIDIA H200" in ended.out
    return numbers


def test_first_line_says_that_it_is_a_prediction(command, fitted: Path) -> None:
    """The second of which banks, and the third how good the model was where it could be checked."""
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted)
    assert ended.code == 0, ended.err
    first, second, third, *_ = ended.out.splitlines()
    assert first.startswith("predicted, never run on a V100")
    assert FIRST in second
    assert "NVIDIA H200" in third
    assert "%" in third
    assert "less than 8 %" in ended.out.splitlines()[-1]


def test_table_has_a_row_for_each_kernel(command, fitted: Path) -> None:
    """Two kernels for each number of tokens, then the layer's range."""
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1, "--tokens", 8)
    rows = [line.split()[:2] for line in ended.out.splitlines()[5:]]
    assert rows[:4] == [["1", "w13_1"], ["1", "w2_1"], ["8", "w13_8"], ["8", "w2_8"]]
    assert [row[0] for row in rows[5:7]] == ["1", "8"]


def test_one_launch(command, fitted: Path) -> None:
    """A line for one token: low, likely and high, and what it saves; the same in JSON."""
    arguments = ("predict", "--kernels", ONE_LAUNCH, "--fitted", fitted, "--tokens", 1, "--metadata", "4-byte")
    (line,) = [line for line in command(*arguments).out.splitlines() if line.startswith("fused_decode, M = 1: ")]
    assert re.search(r": [\d.]+ [\d.]+ [\d.]+, saves [\d.]+ \(-?[\d.]+ to [\d.]+\) against two launches", line)
    (made,) = json.loads(command(*arguments, "--json").out)["predictions"]
    times = made["fused_decode"]["microseconds"]
    assert made["floor_nominal"] <= times["low"] <= times["likely"] <= times["high"]
    saved = made["fused_decode"]["saved"]["likely"]
    assert saved == pytest.approx(made["microseconds"]["likely"] - times["likely"], abs=2e-3)
    assert f"saves {saved:.1f}" in line
    parts = made["fused_decode"]["parts"]
    assert (parts["registers"], parts["blocks"], parts["resident_blocks"]) == (64, 400, 5)
    assert {part: row["most_per_block"] for part, row in parts["tasks"].items()} == {"w13": 1, "w2": 1}


def test_metadata_is_the_plans(command, fitted: Path) -> None:
    """As the policy plans with no flag set, whatever is set; the heading says so, and why."""
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1)
    (_, heading, *_), report = command(*arguments).out.splitlines(), json.loads(command(*arguments, "--json").out)
    assert heading.startswith("3-byte")
    assert "compact_metadata" in heading
    assert report["predictions"][0]["metadata"] == report["metadata"]["kind"] == "3-byte"
    (_, heading, *_) = command(*arguments, "--metadata", "4-byte").out.splitlines()
    assert heading.startswith("4-byte")
    assert "--metadata" in heading
    assert "3-byte is planned" in heading


def test_flags_of_the_environment_do_not_count(command, fitted: Path, monkeypatch) -> None:
    """It is about a GPU elsewhere."""
    monkeypatch.setenv("SM70_MOE_COMPACT_METADATA", "0")
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1)
    assert ended.out.splitlines()[1].startswith("3-byte")


def policy_file(folder: Path, *changes: tuple[str, str]) -> Path:
    """The first contract's policy with changed text; what is changed is a pattern."""
    text = Path(load_policy(FIRST).origin).read_text(encoding="utf-8")
    for pattern, new in changes:
        text, count = re.subn(pattern, new, text)
        assert count == 1
    (folder / "own.toml").write_text(text, encoding="utf-8")
    return folder / "own.toml"


FUSED_FEATURE = r"(?ms)^\[features.fused_decode\].*?\n\n"
QPN_FEATURE, QPN_ROUTE = r"(?ms)^\[features.qpn_m1\].*?\n\n", r'(?ms)^\[\[route\]\]\nname    = "qpn_m1".*?\n\n'
NATIVE_FEATURE = r"(?ms)^\[features.native_decode\].*?\n\n"
NATIVE_ROUTE = r'(?ms)^\[\[route\]\]\nname    = "native_decode".*?\n\n'
EVIDENCE = r"(?ms)^\[\[evidence\]\].*"


def test_metadata_of_another_policy(command, fitted: Path, tmp_path: Path) -> None:
    """Off while unset: 4-byte. The name decides whether the figure of the whole model is this policy's."""
    own = policy_file(tmp_path, ('metadata = "3-byte"', 'metadata = "3-byte"\nunset = "off"'), (f'"{FIRST}"', '"own"'))
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1, "--policy", own)
    ended = command(*arguments)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1].startswith("4-byte")
    assert "whole model" not in ended.out
    assert json.loads(command(*arguments, "--json").out)["whole_step"] is None


def test_whole_model_is_the_first_contracts_on_v100s(command, fitted: Path) -> None:
    """Its source is said, and there is no such figure for an H200."""
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1)
    assert "not checked here" in command(*arguments).out.splitlines()[-1]
    assert "published" not in command(*arguments).out
    assert "not checked here" in json.loads(command(*arguments, "--json").out)["whole_step"]["source"]
    assert "whole model" not in command(*arguments, "--gpu", "h200").out
    assert json.loads(command(*arguments, "--gpu", "h200", "--json").out)["whole_step"] is None


def test_policy_without_a_route_for_one_token(command, fitted: Path, tmp_path: Path) -> None:
    """Numbers of tokens that take no native route have no numbers; an option that is not there has no line."""
    gone = (FUSED_FEATURE, QPN_FEATURE, QPN_ROUTE, NATIVE_FEATURE, NATIVE_ROUTE, EVIDENCE)
    own = policy_file(tmp_path, *((part, "") for part in gone))
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted, "--policy", own)
    ended = command(*arguments, "--tokens", "1,2")
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("M = 1")]
    assert "no native route" in line
    assert "legacy_single_token" in line
    assert "fused_decode" not in ended.out
    report = json.loads(command(*arguments, "--tokens", "1,2", "--json").out)
    assert [row["tokens"] for row in report["predictions"]] == [2]
    assert [row["tokens"] for row in report["missing"]] == [1]
    alone = command(*arguments, "--tokens", 1)
    assert alone.code == 2
    assert "no native route" in alone.err


def test_one_launch_only_as_an_option(command, fitted: Path, tmp_path: Path) -> None:
    """A policy that does not have it cannot ask for it."""
    own = policy_file(tmp_path, (FUSED_FEATURE, ""))
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted, "--policy", own, "--tokens", 1)
    ended = command(*arguments)
    assert ended.code == 0, ended.err
    assert "fused_decode" not in ended.out
    assert "fused_decode" not in json.loads(command(*arguments, "--json").out)["predictions"][0]


def test_policy_that_is_not_for_this_gpu(command, fitted: Path, tmp_path: Path) -> None:
    """Its plan takes the portable route for everything."""
    own = policy_file(tmp_path, ('"sm_70", "sm_90"', '"sm_90"'), (NATIVE_FEATURE, ""), (NATIVE_ROUTE, ""))
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted, "--policy", own)
    ended = command(*arguments)
    assert ended.code == 2
    assert "no native route" in ended.err
    assert command(*arguments, "--gpu", "h200").code == 0


@pytest.mark.parametrize("given", [("--tokens", "4,1,4"), ("--tokens", 4, "--tokens", 1)])
def test_tokens_with_commas_and_again(command, fitted: Path, given: tuple) -> None:
    """Both forms, each number once, in their order."""
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted, *given, "--json")
    assert ended.code == 0, ended.err
    assert [row["tokens"] for row in json.loads(ended.out)["predictions"]] == [4, 1]


def test_missing_version_is_named_among_few(command, fitted: Path, monkeypatch) -> None:
    """Those of its architecture that are most like it, not all that there are."""
    real = ReadBuild.open

    def opened(folder: Path | None, architecture: str) -> ReadBuild:
        build = real(folder, architecture)
        kept = next(i for i in build.cubins.images if i.version.source == "decode_w13")
        versions = [
            replace(kept.version, source="decode_fused", architecture=a, sizes=(("hidden", 32 * n),), axes=())
            for a in ("sm_70", "sm_90")
            for n in range(1, 25)
        ]
        images = (*build.cubins.images, *(replace(kept, version=version) for version in versions))
        fused = real(ONE_LAUNCH, architecture).manifests
        return replace(build, cubins=replace(build.cubins, images=images), manifests={**fused, **build.manifests})

    monkeypatch.setattr(ReadBuild, "open", opened)
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1)
    line = ended.out[ended.out.index("fused_decode, M = 1") : ended.out.index("whole model")]
    assert "decode_fused.sm_70.hidden2560" in line
    assert "3-byte" in line
    assert len(re.findall("hidden[0-9]+", line)) == 1 + 3
    assert "21 more" in line
    assert "sm_90" not in line
    assert len(line) < 400


def test_build_without_one_launch(command, fitted: Path) -> None:
    """It is said, and the rest is there."""
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted)
    ended = command(*arguments)
    assert ended.code == 0
    (line,) = [line for line in ended.out.splitlines() if line.startswith("fused_decode")]
    assert "not predicted" in line
    assert "decode_fused" in line
    assert [row["tokens"] for row in json.loads(command(*arguments, "--json").out)["predictions"]] == [1, 2, 4, 8]


def lacking(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """A build whose images do not hold one of the kernels."""
    real = ReadBuild._kernel

    def found(self: ReadBuild, geometry: Geometry, step: Step, architecture: str) -> tuple[Cubin, Census]:
        if step.kernel == kernel:
            raise BackendError(f"an image has no kernel {kernel!r}; build again")
        return real(self, geometry, step, architecture)

    monkeypatch.setattr(ReadBuild, "_kernel", found)


def test_a_missing_version_costs_its_row_only(command, fitted: Path, monkeypatch) -> None:
    """The number of tokens and the kernel are named; with no row left it is an error."""
    lacking(monkeypatch, "w2_4")
    arguments = ("predict", "--kernels", BUILD, "--fitted", fitted)
    ended = command(*arguments, "--tokens", 1, "--tokens", 4)
    assert ended.code == 0
    (line,) = [line for line in ended.out.splitlines() if line.startswith("M = 4")]
    assert "w2_4" in line
    report = json.loads(command(*arguments, "--tokens", 1, "--tokens", 4, "--json").out)
    assert [row["tokens"] for row in report["predictions"]] == [1]
    assert [row["tokens"] for row in report["missing"]] == [4]
    alone = command(*arguments, "--tokens", 4)
    assert alone.code == 2
    assert "w2_4" in alone.err


@pytest.mark.parametrize(("metadata", "named"), [("3-byte", "decode_w13"), ("2.5-byte", "decode_w13")])
def test_metadata_that_was_not_built(command, fitted: Path, metadata: str, named: str) -> None:
    """Nothing is left to predict: an error that names the source and what there is."""
    ended = command("predict", "--kernels", ONE_LAUNCH, "--fitted", fitted, "--metadata", metadata)
    assert ended.code == 2
    assert named in ended.err
    assert metadata in ended.err


def run_with_fused(path: Path) -> Path:
    """The measurements with a row of one launch."""
    record = json.loads(RUN.read_text())
    row = next(r for r in record["rows"] if (r["arm"], r["part"], r["tokens"]) == ("ours", "both", 1))
    record["rows"].append(row | {"arm": "fused", "launch": "plain", "metadata": "4-byte", "routing": "uniform"})
    path.write_text(json.dumps(record))
    return path


def test_fit_checks_one_launch(command, fitted: Path, tmp_path: Path, monkeypatch) -> None:
    """A row of one launch changes no number; how far the model is off for it is said, also by later predictions."""
    measured = run_with_fused(tmp_path / "bench.json")
    real = ReadBuild.fused
    own = ReadBuild.open(ONE_LAUNCH, "sm_90")
    monkeypatch.setattr(ReadBuild, "fused", lambda self, call, gpu: real(own, call, gpu))
    ended = command("predict", "--kernels", BUILD, "--fit", measured, tmp_path / "out.json")
    assert ended.code == 0, ended.err
    assert "fused plain both 4-byte M=1 uniform" in ended.out
    before, after = (json.loads(path.read_text()) for path in (fitted, tmp_path / "out.json"))
    assert list(after["checks"]) == ["fused plain both 4-byte M=1 uniform"]
    assert (after["parameters"], after["residuals"]) == (before["parameters"], before["residuals"])
    shown = command("predict", "--kernels", BUILD, "--fitted", tmp_path / "out.json", "--tokens", 2)
    assert "a check and not fitted" in shown.out


def test_fit_on_a_build_without_one_launch(command, fitted: Path, tmp_path: Path) -> None:
    """The fit is made all the same, and why nothing was checked is said."""
    ended = command("predict", "--kernels", BUILD, "--fit", run_with_fused(tmp_path / "b.json"), tmp_path / "out.json")
    assert ended.code == 0, ended.err
    assert "not checked" in ended.out
    assert "decode_fused" in ended.out
    before, after = (json.loads(path.read_text()) for path in (fitted, tmp_path / "out.json"))
    assert (after["parameters"], after["checks"]) == (before["parameters"], {})


def test_json(command, fitted: Path) -> None:
    """The same with everything that was counted."""
    ended = command("predict", "--kernels", BUILD, "--fitted", fitted, "--tokens", 1, "--metadata", "4-byte", "--json")
    report = json.loads(ended.out)
    assert report["label"] == "predicted, never run on a V100"
    assert report["fitted"]["build"] == "by hand"
    (made,) = report["predictions"]
    assert made["label"] == report["label"]
    assert made["microseconds"]["low"] <= made["microseconds"]["likely"] <= made["microseconds"]["high"]
    assert made["floor_nominal"] <= made["microseconds"]["low"]
    assert [kernel["kernel"] for kernel in made["kernels"]] == ["w13_1", "w2_1"]
    assert [kernel["bytes"] for kernel in made["kernels"]] == [5_120_000, 2_560_000]


@pytest.mark.parametrize(("microseconds", "code"), [(20.0, 0), (200.0, 1)])
def test_comparison(judge, microseconds: float, code: int) -> None:
    """Exit 1 if a V100 was seen to be outside of the range in the only row."""
    rows = {"rows": [OURS | {"microseconds": microseconds}]}
    ended = judge(rows, "--json")
    assert ended.code == code
    (found,) = json.loads(ended.out)["rows"]
    assert found["measured"] == microseconds
    assert found["inside"] is (code == 0)
    assert judge(rows).code == code


OURS = {
    "arm": "ours",
    "launch": "plain",
    "part": "both",
    "metadata": "4-byte",
    "tokens": 1,
    "routing": "uniform",
    "distinct": 10.0,
    "microseconds": 20.0,
}


@pytest.mark.parametrize(("outside", "code"), [(0, 0), (1, 0), (2, 1), (5, 1)])
def test_some_rows_outside(judge, outside: int, code: int) -> None:
    """One in five is still what chance may do; more count against the model. Each row outside is listed."""
    rows = [OURS | {"tokens": tokens, "distinct": 10.0 + tokens - 1} for tokens in range(1, 6)]
    likely = [row["predicted"]["likely"] for row in json.loads(judge({"rows": rows}, "--json").out)["rows"]]
    for i, row in enumerate(rows):
        row["microseconds"] = likely[i] * (3 if i < outside else 1)
    ended = judge({"rows": rows})
    assert ended.code == code, ended.err
    (count,) = [line for line in ended.out.splitlines() if line.startswith(f"{outside} of 5 rows outside")]
    assert "5 to 95 %" in count
    assert "one in ten is expected" in count
    listed = ended.out.split(count)[1].splitlines()[1:]
    assert [line.split(":")[0].strip() for line in listed] == [
        f"ours plain both 4-byte M={row['tokens']} uniform" for row in rows[:outside]
    ]
    report = json.loads(judge({"rows": rows}, "--json").out)
    assert len(report["outside"]["rows"]) == outside
    assert report["against"] is bool(code)


SIZES = {"hidden": 2560, "intermediate": 160, "experts": 512, "top_k": 10, "group": 32}
READ = json.loads((BUILD / "BUILD.json").read_text())["id"]


@pytest.fixture
def judge(command, fitted: Path, tmp_path: Path):
    """judge(changes of a V100's file, options...) -> how `--compare` ended."""

    def run(changes: dict, *options: object):
        record = {"schema": 1, "gpu": {"name": "Tesla V100-SXM2-16GB"}, "build": READ, "policy": FIRST, "rows": [OURS]}
        (tmp_path / "report.json").write_text(json.dumps(record | changes))
        return command(
            "predict", "--kernels", BUILD, "--fitted", fitted, "--compare", tmp_path / "report.json", *options
        )

    return run


def test_comparison_of_another_geometry(judge) -> None:
    """A file's sizes are those that are judged; the build has no kernels for these."""
    ended = judge({"policy": "mine", "geometry": SIZES | {"hidden": 2048}})
    assert ended.code == 2
    assert "2048" in ended.err


@pytest.mark.parametrize("policy", ["mine", "qwen3-30b-a3b-awq-tp4"])
def test_comparison_by_the_files_sizes(judge, policy: str) -> None:
    """Whatever their policy is called here."""
    ended = judge({"policy": policy, "geometry": SIZES}, "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert (report["policy"], report["geometry"]) == (policy, SIZES)


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"policy": "mine"}, (), "'mine'"),
        ({"policy": "generic-awq"}, (), "generic-awq"),
        ({"policy": "mine"}, ("--policy", FIRST), "'mine'"),
        ({"policy_digest": "d" * 64}, (), "d" * 64),
        ({"geometry": SIZES}, ("--policy", "qwen3-30b-a3b-awq-tp4"), "2048"),
        ({"geometry": SIZES | {"top_k": 0}}, (), "top_k"),
        ({"geometry": SIZES | {"hidden": 2561}}, (), "2561"),
        ({"geometry": SIZES | {"hidden": 10**400}}, (), "geometry"),
        ({"geometry": {}}, (), "hidden"),
        ({"rows": [OURS | {"distinct": 9.0}]}, (), "distinct"),
        ({"rows": [OURS | {"distinct": 11.0}]}, (), "distinct"),
        ({"rows": [OURS, OURS | {"arm": "separator", "microseconds": 20.0}]}, (), "separating"),
    ],
)
def test_what_cannot_be_compared(judge, changes: dict, options: tuple, named: str) -> None:
    """A policy that is not known here, or is another than was asked for; sizes of no layer; times of no kernel."""
    ended = judge(changes, *options)
    assert ended.code == 2
    assert named in ended.err


def test_comparison_says_what_differs(judge) -> None:
    """Builds, and revisions of a policy; nothing where nothing does."""
    assert READ not in judge({}).out
    other = {"build": "b" * 64, "policy_digest": "d" * 64, "geometry": SIZES}
    ended = judge(other)
    assert ended.code == 0, ended.err
    for named in ("b" * 64, READ, "d" * 64):
        assert named in ended.out
    report = json.loads(judge(other, "--json").out)
    assert (report["build"], report["read_build"], len(report["differences"])) == ("b" * 64, READ, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"geometry": SIZES | {"group": 64}}, "'group': 64"),
        ({"policy": "mine"}, "'mine'"),
        ({"source": None}, READ),
        ({"source": None}, "by hand"),
    ],
)
def test_fit_to_other_kernels(command, tmp_path: Path, changes: dict, named: str) -> None:
    """Another geometry or policy, and another build of which the file does not say where it comes from."""
    (tmp_path / "bench.json").write_text(json.dumps(json.loads(RUN.read_text()) | changes))
    ended = command("predict", "--kernels", BUILD, "--fit", tmp_path / "bench.json", tmp_path / "out.json")
    assert ended.code == 2
    assert named in ended.err
    assert not (tmp_path / "out.json").exists()


def test_fit_says_which_builds(command, fitted: Path, tmp_path: Path) -> None:
    """A documented difference is accepted, and said; the file has both."""
    ended = command("predict", "--kernels", BUILD, "--fit", RUN, tmp_path / "out.json")
    assert ended.code == 0, ended.err
    assert READ in ended.out
    made = json.loads((tmp_path / "out.json").read_text())
    assert (made["build"], made["code"]) == ("by hand", READ)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gpu", "v200"), "v100-sxm2-16"),
        (("--tokens", 9), "1 to 8"),
        (("--tokens", "1,9"), "1 to 8"),
        (("--tokens", "1 4"), "commas"),
        (("--policy", "generic-awq"), "generic-awq"),
        (("--policy", "nobody"), "nobody"),
        (("--routing", "random"), "uniform"),
        (("--fitted", "none.json"), "none.json"),
        (("--fit", "none.json", "out.json"), "none.json"),
        (("--compare", "none.json"), "none.json"),
        (("--fit", RUN, "out.json", "--compare", RUN), "--compare"),
        (("--fit", RUN, "out.json", "--json"), "--json"),
        (("--fit", RUN, "out.json", "--gpu", "h200"), "--gpu"),
        (("--fit", RUN, "out.json", "--fitted", "none.json"), "--fitted"),
        (("--fit", RUN, "out.json", "--policy", "qwen3-30b-a3b-awq-tp4"), "qwen3-30b-a3b-awq-tp4"),
        (("--fit", RUN, RUN), "h200-run9.json"),
        (("--compare", RUN, "--tokens", 1), "--tokens"),
        (("--compare", RUN, "--metadata", "4-byte"), "--metadata"),
        (("--compare", RUN, "--policy", "qwen3-30b-a3b-awq-tp4"), "qwen3-30b-a3b-awq-tp4"),
    ],
)
def test_bad_input(command, arguments: tuple, named: str, tmp_path: Path, monkeypatch) -> None:
    """Exit 2, the thing is named, nothing is written."""
    monkeypatch.chdir(tmp_path)
    ended = command("predict", "--kernels", BUILD, *arguments)
    assert ended.code == 2
    assert named in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_not_replaced(command, tmp_path: Path) -> None:
    """OUT has to be a file or nothing; a pipe stays a pipe."""
    os.mkfifo(tmp_path / "pipe")
    ended = command("predict", "--kernels", BUILD, "--fit", RUN, tmp_path / "pipe")
    assert ended.code == 2
    assert (tmp_path / "pipe").is_fifo()


def test_no_build(command, tmp_path: Path) -> None:
    """A clear error: there is nothing to read."""
    ended = command("predict", "--kernels", tmp_path)
    assert ended.code == 2
    assert "no native build" in ended.err


@pytest.mark.parametrize(
    "code",
    [
        "import sm70_moe.cli.app",
        "from sm70_moe.cli.app import app; app(['explain', '--help'], standalone_mode=False)",
        "import sm70_moe.cli.explain, sm70_moe.record.explanation",
    ],
)
def test_other_commands_need_no_numpy(code: str) -> None:
    """The model's modules take numpy; the program and `explain` are there without, and without torch."""
    ask = f"import sys; {code}; sys.exit(str([n for n in ('numpy', 'torch') if n in sys.modules] or ''))"
    ended = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert ended.stderr.strip() == ""
