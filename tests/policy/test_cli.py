from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm70_moe.cli.policy import app
from sm70_moe.policy import load_policy, policies_folder, policy_schema

FIRST = "qwen3.8-flash-next-awq-tp4"


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_check_accepts_the_shipped_files() -> None:
    """One line per file, exit 0."""
    files = sorted(str(path) for path in policies_folder().glob("*.toml"))
    code, out, err = run("check", *files)
    assert (code, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()] == files
    assert load_policy(FIRST).digest in out


def test_check_prints_every_problem_of_every_file(tmp_path: Path, base: str) -> None:
    """A good file does not hide the bad ones; exit 2."""
    good, bad, worse = (tmp_path / f"{name}.toml" for name in ("good", "bad", "worse"))
    good.write_text(base)
    bad.write_text(base.replace("revision = 1", "revision = true").replace('"indexed"', '"indexd"'))
    worse.write_text("schema = ")
    code, out, err = run("check", str(bad), str(good), str(worse), str(tmp_path / "none.toml"))
    assert code == 2
    starts = [
        f"{bad}:3: revision",
        f"{bad}:29: route[0].backend",
        f"{good}: ok",
        f"{worse}:1: ",
        f"{tmp_path}/none.toml: ",
    ]
    lines = out.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    assert "4" in err


def test_show_cuts_nothing_when_piped() -> None:
    """Every variable, check and text of the policy is there in full."""
    code, out, _ = run("show", FIRST)
    policy = load_policy(FIRST)
    assert code == 0
    assert policy.digest in out
    for name, feature in policy.features.items():
        assert f"SM70_MOE_{name.upper()}" in out
        assert feature.doc in out
        assert ", ".join(feature.checks) in out
        assert all(variable in out for variable in feature.env)
    assert policy.evidence[0].limits in out
    assert "x_shape 1, 2560" in out


def test_show_as_json_is_the_whole_policy() -> None:
    """Record and digest, as plain JSON."""
    code, out, _ = run("show", FIRST, "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["digest"] == load_policy(FIRST).digest
    assert shown["content"] == load_policy(FIRST).record()


def test_show_reads_a_path(tmp_path: Path, base: str) -> None:
    """Text in brackets is text, not colour."""
    path = tmp_path / "own.toml"
    path.write_text(base.replace("A policy for tests", "A [red]policy[/red]"))
    code, out, _ = run("show", str(path))
    assert code == 0
    assert "A [red]policy[/red]" in out


@pytest.mark.parametrize("arguments", [("show", "gneric-awq"), ("diff", "generic-awq", "gneric-awq")])
def test_an_unknown_policy_is_bad_input(arguments: tuple[str, ...]) -> None:
    """Exit 2, with the nearest name on standard error and nothing on standard output."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert '"generic-awq"' in err


def test_schema_prints_the_shipped_file() -> None:
    """Byte for byte, so that redirecting it updates the file."""
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out) == policy_schema()
    assert out == (policies_folder() / "schema.json").read_text()


def test_diff_exits_by_its_answer(tmp_path: Path, base: str) -> None:
    """0 for the same content, 1 for another, with each key and both values."""
    a, b, c = (tmp_path / f"{name}.toml" for name in "abc")
    a.write_text(base)
    b.write_text("# only a comment more\n" + base)
    c.write_text(base.replace("tokens = [2, 8]", "tokens = [2, 4]"))
    assert run("diff", str(a), str(b))[0] == 0
    code, out, _ = run("diff", str(a), str(c))
    assert code == 1
    assert out.splitlines()[1].split() == ["route.fast.tokens.last", "8", "4"]
    code, out, _ = run("diff", str(a), str(c), "--json")
    assert code == 1
    assert json.loads(out) == [{"key": "route.fast.tokens.last", "a": 8, "b": 4}]
    assert json.loads(run("diff", str(a), str(b), "--json")[1]) == []


def test_list_names_every_shipped_policy() -> None:
    """As a table and as JSON."""
    code, out, _ = run("list")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()[1:]]
    listed = json.loads(run("list", "--json")[1])
    assert names == [entry["name"] for entry in listed]
    assert FIRST in names
    assert all({"revision", "digest", "summary", "features", "routes", "origin"} <= set(entry) for entry in listed)


def test_a_broken_installation_is_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shipped file that does not load ends `list` with exit 2."""
    (tmp_path / "broken.toml").write_text("schema = ")
    monkeypatch.setattr("sm70_moe.policy.load.policies_folder", lambda: tmp_path)
    code, out, err = run("list")
    assert (code, out) == (2, "")
    assert str(tmp_path / "broken.toml") in err
