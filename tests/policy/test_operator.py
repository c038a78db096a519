"""Settings and policies read together: everything that is wrong comes in one error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sm70_moe.errors import PolicyError, SettingsError
from sm70_moe.policy import load_policy, parse_policy, policies_folder, read_operator
from sm70_moe.policy.operator import named
from sm70_moe.settings.given import read_variables
from sm70_moe.settings.settings import Settings


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of whoever runs the tests do not count here."""
    for name in list(os.environ):
        if name.startswith(("SM70_MOE_", "VLLM_SM70_")):
            monkeypatch.delenv(name)


@pytest.fixture
def own(tmp_path: Path, base: str) -> Path:
    """A policy with a flag that only it has: SM70_MOE_FAST."""
    path = tmp_path / "own.toml"
    path.write_text(base)
    return path


def lines(policy: Path | None = None, settings: Settings | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read_operator(policy and str(policy), settings)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("asked", ["argument", "variable"])
def test_wrong_flags_of_ones_own_policy_come_with_the_rest(
    own: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong setting, a wrong shipped flag and a wrong flag of one's own: three lines, each once."""
    if asked == "variable":
        monkeypatch.setenv("SM70_MOE_POLICY", str(own))
    monkeypatch.setenv("SM70_MOE_STRICT", "2")
    monkeypatch.setenv("SM70_MOE_FAST", "yes")
    monkeypatch.setenv("SM70_MOE_QPN_M1", "on")
    assert sorted(lines(own if asked == "argument" else None)) == [
        "SM70_MOE_FAST='yes': accepted values are 0 and 1",
        "SM70_MOE_QPN_M1='on': accepted values are 0 and 1",
        "SM70_MOE_STRICT='2': accepted values are 0 and 1",
    ]


def test_strict_names_come_with_wrong_flags(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under strict an unknown name is one problem more, not the only one."""
    monkeypatch.setenv("SM70_MOE_STRICT", "1")
    monkeypatch.setenv("SM70_MOE_FAST", "yes")
    monkeypatch.setenv("SM70_MOE_NOTHING_LIKE_IT", "1")
    found = lines(own)
    assert len(found) == 2
    assert found[0] == "SM70_MOE_FAST='yes': accepted values are 0 and 1"
    assert found[1].startswith("SM70_MOE_NOTHING_LIKE_IT is not known")


def test_an_argument_goes_before_the_variable_where_other_settings_are_wrong(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose flags are asked: those of the policy that was meant, named by a value or by nobody."""
    monkeypatch.setenv("SM70_MOE_POLICY", str(tmp_path / "missing.toml"))
    monkeypatch.setenv("SM70_MOE_STRICT", "2")
    monkeypatch.setenv("SM70_MOE_FAST", "yes")
    with pytest.raises(SettingsError) as caught:
        read_operator(policy=None, layer_deny="a")  # type: ignore[arg-type]  # a value of settings
    assert str(tmp_path / "missing.toml") in str(caught.value)
    assert "FAST" not in str(caught.value)
    assert "SM70_MOE_FAST" in "".join(lines(own))


def test_a_policy_among_the_values_goes_before_the_variable(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other settings are wrong too: its flags are asked, and the variable's file is not looked for."""
    monkeypatch.setenv("SM70_MOE_POLICY", str(tmp_path / "missing.toml"))
    monkeypatch.setenv("SM70_MOE_STRICT", "2")
    monkeypatch.setenv("SM70_MOE_FAST", "yes")
    raw = Settings.model_construct(given=read_variables(os.environ, None), flag_arguments=())
    assert named(raw, {"policy": str(own)}) == str(own)
    assert named(raw, {}) == str(tmp_path / "missing.toml")
    assert named(raw, {"policy": " "}) is None


def test_wrong_settings_without_a_policy_ask_the_shipped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody named one: every shipped policy applies."""
    monkeypatch.setenv("SM70_MOE_STRICT", "2")
    assert lines() == ["SM70_MOE_STRICT='2': accepted values are 0 and 1"]


def test_given_settings_are_asked_too(own: Path) -> None:
    """Settings that an engine made know nothing of a policy's own flags."""
    given = Settings.from_env({"SM70_MOE_FAST": "yes"})
    assert lines(own, given) == ["SM70_MOE_FAST='yes': accepted values are 0 and 1"]


def test_a_wrong_policy_is_told_beside_wrong_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With settings that are right it stays a PolicyError."""
    missing = tmp_path / "missing.toml"
    with pytest.raises(PolicyError):
        read_operator(str(missing))
    monkeypatch.setenv("SM70_MOE_STRICT", "2")
    found = lines(missing)
    assert found[0].startswith("SM70_MOE_STRICT='2'")
    assert str(missing) in found[1]


def test_what_is_right_is_read(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument goes before the variable; a policy that is handed over is taken as it is."""
    monkeypatch.setenv("SM70_MOE_POLICY", "generic-awq")
    settings, policies = read_operator()
    assert (settings.policy, [policy.name for policy in policies]) == ("generic-awq", ["generic-awq"])
    assert [policy.name for policy in read_operator(str(own))[1]] == ["base"]
    parsed = parse_policy((policies_folder() / "generic-awq.toml").read_text())
    assert read_operator(parsed)[1] == (parsed,)
    assert read_operator(load_policy("generic-awq"), Settings())[0] == Settings()
