"""The installed wheel, from outside the checkout and without torch: everything that decides is there.

Run by `tox -e wheel`, which installs the wheel and nothing but its own dependencies and pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

import sm70_moe
from sm70_moe.kernels.build import INSTALLED, SOURCES
from sm70_moe.machine.installed import installed_build
from sm70_moe.policy import policies_folder, shipped_policies

CHECKOUT = Path(__file__).parents[2]
CHECKPOINT = CHECKOUT / "tests" / "data" / "tiny-qwen3-moe-awq"
PACKAGE = Path(sm70_moe.__file__).parent


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The console script that the wheel installed."""
    script = Path(sys.executable).with_name("sm70-moe")
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)


def test_the_package_under_test_is_the_installed_one() -> None:
    """Nothing of the checkout is imported, and the working directory is not in it by accident."""
    assert PACKAGE.is_relative_to(sys.prefix)
    assert not (Path.cwd() / "sm70_moe").exists()
    assert find_spec("torch") is None


def test_the_policies_are_inside_the_wheel() -> None:
    """Byte for byte those of the checkout, and all of them load."""
    assert policies_folder() == PACKAGE / "policies"
    source = {path.name: path.read_bytes() for path in (CHECKOUT / "policies").iterdir()}
    assert {path.name: path.read_bytes() for path in policies_folder().iterdir()} == source
    assert {f"{policy.name}.toml" for policy in shipped_policies()} == {name for name in source if name[-5:] == ".toml"}


def test_the_package_is_typed() -> None:
    """A user's type checker finds the annotations."""
    assert (PACKAGE / "py.typed").is_file()


def test_the_kernels_are_inside_the_wheel() -> None:
    """Sources as in the checkout, and a build of exactly these for every architecture and shipped policy."""
    source = CHECKOUT / "sm70_moe" / "kernels" / "cuda"
    assert {p.name: p.read_bytes() for p in SOURCES.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}
    build = installed_build()
    if os.environ.get("SM70_MOE_BUILD_KERNELS") == "0":
        assert build is None
        return
    assert build is not None
    assert build.id == build.expected
    assert sorted(build.images) == ["sm_100", "sm_120", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90"]


def test_the_kernels_keep_their_budgets() -> None:
    """The installed command reads every cubin."""
    if installed_build() is None:
        pytest.skip("this wheel was built without native kernels")
    done = command("kernels", "--json")
    assert done.returncode == 0, done.stdout
    assert {row["architecture"] for row in json.loads(done.stdout)["kernels"]} == installed_build().images


def test_the_kernels_take_little_room() -> None:
    """Under 5 MB, packed as they are; the rest of the wheel is a tenth of that."""
    if installed_build() is None:
        pytest.skip("this wheel was built without native kernels")
    assert sum(path.stat().st_size for path in INSTALLED.iterdir()) < 5_000_000


def test_tests_and_tooling_are_not_in_the_wheel() -> None:
    """A wheel installs one package."""
    assert not [name for name in ("tests", "bench", "examples", "docs") if (PACKAGE.parent / name).exists()]
    assert [point.value.split(":")[0].split(".")[0] for point in entry_points(name="sm70-moe")] == ["sm70_moe"]


def test_explain_works_without_torch() -> None:
    """Which route each layer would take, from config and headers alone."""
    done = command("explain", os.fspath(CHECKPOINT), "--tp", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "legacy" in json.dumps(json.loads(done.stdout))


@pytest.mark.parametrize("arguments", [("version",), ("doctor", "--json"), ("policy", "schema"), ("--help",)])
def test_commands_that_need_no_torch(arguments: tuple[str, ...]) -> None:
    """They answer, also in the smallest installation."""
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_wrong_flag_ends_with_exit_code_2() -> None:
    """The installed command is as strict as the library."""
    name = "VLLM_SM70_AWQ_QWEN38_QPN_M1"
    script = Path(sys.executable).with_name("sm70-moe")
    done = subprocess.run(
        [script, "explain", os.fspath(CHECKPOINT), "--tp", "1"],
        env=os.environ | {name: "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"{name}='true'" in done.stderr
