"""The project's own files agree with each other."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins_of(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


PINS = pins_of("constraints.txt")

TOX = configparser.ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini", encoding="utf-8")
ENVIRONMENTS = {name.removeprefix("testenv:") for name in TOX.sections() if name.startswith("testenv:")} - {".pkg"}


def test_ci_runs_the_command_of_the_readme() -> None:
    """The last line of .ci/run stands in README and CONTRIBUTING, word by word."""
    command = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    assert "tox" in command
    for name in ("README.md", "CONTRIBUTING.md"):
        assert command in (ROOT / name).read_text(encoding="utf-8").splitlines()


def test_every_dependency_is_pinned_within_its_range() -> None:
    """What pyproject.toml allows contains what constraints.txt pins."""
    extras = PROJECT["project"]["optional-dependencies"]
    for line in [*PROJECT["project"]["dependencies"], *(line for extra in extras.values() for line in extra)]:
        requirement = Requirement(line)
        # cuda-bindings is 12 or 13, as the driver is; a host has an environment for each version that is tried
        if requirement.name in ("cuda-bindings", "transformers"):
            continue
        assert requirement.specifier.contains(PINS[requirement.name]), line


def test_pages_name_environments_of_tox() -> None:
    """Whatever `tox -e` a page tells a reader to run is there, and CONTRIBUTING tells of all."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {page.name: set(re.findall(r"tox -e ([\w-]+)", page.read_text(encoding="utf-8"))) for page in pages}
    assert set().union(*named.values()) == ENVIRONMENTS
    assert named["CONTRIBUTING.md"] == ENVIRONMENTS


def requirements(name: str) -> list[str]:
    """What tox installs in an environment, line by line."""
    text = TOX[f"testenv:{name}"].get("deps", TOX["testenv"]["deps"])
    while found := re.search(r"{\[(\w+)\]deps}", text):
        text = text.replace(found[0], TOX[found[1]]["deps"])
    if file := re.fullmatch(r"-r (\S+)", text):
        text = (ROOT / file[1]).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_environments_install_what_is_pinned(name: str) -> None:
    """Each requirement has its version beside it or in the constraints; torch is the same everywhere."""
    lines = requirements(name)
    pins = dict(PINS) if "-c constraints.txt" in lines else {}
    if "-c tests/formats/constraints.txt" in lines:
        pins |= pins_of("tests/formats/constraints.txt")
    installed = [line for line in lines if not line.startswith("-c ")]
    assert [line for line in installed if line not in pins and "==" not in line] == []
    assert pins.get("torch") == PINS["torch"] or f"torch=={PINS['torch']}" in installed


@pytest.mark.parametrize(
    "module",
    [n for c in PROJECT["tool"]["importlinter"]["contracts"] if "no torch" in c["name"] for n in c["source_modules"]],
)
def test_modules_that_decide_leave_torch_out(module: str) -> None:
    """What import-linter reads from the source holds when a fresh interpreter imports the module."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_sdist_has_what_the_docs_name() -> None:
    """Every file of the checkout that a page tells a reader to run is one that an sdist includes."""
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"\bpython ((?:\w+/)+\w+\.py)\b", text))
    assert named
    assert [name for name in sorted(named) if f"/{name.split('/')[0]}" not in included] == []
