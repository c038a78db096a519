"""What the documents say is asked of the code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import sm70_moe
from sm70_moe.admission.admit import admit
from sm70_moe.cli.app import COMMANDS
from sm70_moe.facts import CallFacts
from sm70_moe.plan.layergroup import collapse
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy, shipped_policies
from sm70_moe.record.explanation import explain
from sm70_moe.testing import contract_facts, fake_machine, settings
from sm70_moe.testing.conformance import check_backend

ROOT = Path(__file__).parents[1]
FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text(name), re.DOTALL)


def test_readme_begins_with_exactly_two_commands() -> None:
    """Above the first heading there are two command blocks of one line each."""
    top = text("README.md").split("\n## ")[0]
    commands = re.findall(r"```console\n(.*?)```", top, re.DOTALL)
    assert [c.count("\n") for c in commands] == [1, 1]
    assert commands[0].strip().endswith("sm70-moe demo")
    assert commands[1].strip().endswith("tox")
    assert all("-c constraints.txt" in c for c in commands)


def test_readme_lists_every_command() -> None:
    """Each command of the program stands in the table, and no other."""
    listed = {
        line.split("`")[1].split()[1] for line in text("README.md").splitlines() if line.startswith("| `sm70-moe ")
    }
    assert listed == set(COMMANDS)


def test_readme_shows_what_explain_prints() -> None:
    """The lines of the example are lines of the real output for 48 layers on a V100."""
    machine = fake_machine()
    groups = list(
        collapse(
            admit(FIRST, settings(), contract_facts(FIRST, f"model.layers.{i}.mlp.experts", index=i), machine)
            for i in range(48)
        )
    )
    # the command line does not know what an engine will send, so scratch counts up to 32 tokens
    real = explain(groups).splitlines()
    example = next(b for b in blocks("README.md", "console") if "explain ./checkpoint" in b).splitlines()[1:]
    for line in example:
        if line.startswith("memory"):
            assert line.split(", workspace")[0] in "\n".join(real)
        elif line != "  ...":
            assert line in real


ROWS = [line.split("|")[1:4] for line in text("docs/routes.md").splitlines() if re.match(r"\| \d", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r[0].strip())
def test_published_routes(row: list[str]) -> None:
    """Each row of the route table is what the plan answers."""
    tokens, native, without = (cell.strip().strip("`") for cell in row)
    for expected, build in ((native, "fake"), (without, "missing")):
        plan = Plan(admit(FIRST, settings(), contract_facts(FIRST), fake_machine(build=build)))
        route = plan.route(CallFacts.usual(int(tokens), 2560, 10))
        assert (route.name if route else "none") == expected


def test_published_table_covers_what_it_must() -> None:
    """M = 0..9, 127, 128 and 8192."""
    assert [int(row[0]) for row in ROWS] == [*range(10), 127, 128, 8192]


def test_embedding_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The code block of the guide runs on a real checkpoint and gives finite numbers."""
    names: dict = {}
    code = blocks("docs/embedding.md", "python")[0]
    monkeypatch.chdir(ROOT)
    exec(code, names)
    assert names["out"].shape == (3, 256)
    assert names["out"].isfinite().all()
    assert "supported 2/2" in capsys.readouterr().out


def test_facts_of_the_guide_are_facts() -> None:
    """The second block of the guide makes facts that nothing is missing from."""
    names: dict = {"sm": sm70_moe}
    exec(textwrap.dedent(blocks("docs/embedding.md", "python")[1]), names)
    assert None not in names["facts"].record().values()


def test_backend_example_conforms() -> None:
    """The plug-in of docs/backends.md keeps every clause of the conformance kit."""
    names: dict = {}
    exec(blocks("docs/backends.md", "python")[0], names)
    assert check_backend(names["Mine"](), tokens=(1, 9)) == []


def test_every_policy_is_described() -> None:
    """docs/policies.md names all shipped policies."""
    for policy in shipped_policies():
        assert f"`{policy.name}`" in text("docs/policies.md")


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(name: str) -> None:
    """Every relative link of a document is a file."""
    for target in re.findall(r"\]\(([^)#:]+)\)", text(name)):
        assert ((ROOT / name).parent / target).exists(), target


def test_old_faults_have_the_tests_that_are_named() -> None:
    """Each row of the table names tests that exist, with the file that they are in."""
    rows = [line for line in text("docs/testing.md").splitlines() if "`tests/" in line and "::" in line]
    assert len(rows) >= 13
    for row in rows:
        named = re.findall(r"`(tests/[a-z_0-9/]+\.py)::(test_[a-z0-9_]+)`", row)
        assert named, row
        for file, name in named:
            assert f"def {name}(" in text(file), f"{file}::{name}"
