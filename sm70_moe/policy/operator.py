"""What the operator said: settings and the policies that they name, read together.

Which flags there are is a matter of the policies, so that settings alone cannot tell everything that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sm70_moe.errors import PolicyError, SettingsError
from sm70_moe.policy.document import Policy
from sm70_moe.policy.load import load_policies
from sm70_moe.settings.given import noted, read_variables
from sm70_moe.settings.settings import Settings
from sm70_moe.settings.variables import SETTINGS


def read_operator(
    policy: Policy | str | None = None,
    settings: Settings | None = None,
    *,
    env_file: Path | None = None,
    flags: Mapping[str, str] | None = None,
    **values: Any,
) -> tuple[Settings, tuple[Policy, ...]]:
    """Settings (given, or read from the environment as `Settings.from_env` does) and the policies that apply.

    `policy` goes before what the settings name. Raises one SettingsError for everything that is wrong
    in variables, flags of the policies among them; PolicyError where only a policy is wrong.
    """
    problems: list[str] = []
    if settings is None:
        with noted(problems):
            settings = Settings.from_env(env_file=env_file, flags=flags, **values)
        raw = settings or unchecked(env_file, flags)
    else:
        raw = settings
    name = policy or (settings.policy if settings else named(raw, values))
    try:
        asked = bool(policy or values.get("policy"))  # for this call, and by no setting
        policies = (name,) if isinstance(name, Policy) else load_policies(name, piped=asked)
    except PolicyError as error:
        if not problems:
            raise
        raise SettingsError(*problems, *error.problems) from error
    flag_problems(raw, policies, problems)
    if settings is None or problems:
        raise SettingsError(*dict.fromkeys(problems))
    return settings, policies


def unchecked(env_file: Path | None, flags: Mapping[str, str] | None) -> Settings:
    """Settings whose values may be wrong: only their flags are asked."""
    try:
        given = read_variables(os.environ, env_file)
    except SettingsError:  # the file itself: told already
        given = read_variables(os.environ, None)
    return Settings.model_construct(given=given, flag_arguments=tuple(sorted((flags or {}).items())))


def named(raw: Settings, values: Mapping[str, Any]) -> str | None:
    """The policy that was asked for, where other settings are wrong."""
    names = next(row.names for row in SETTINGS if row.setting == "policy")
    found = values.get("policy") or next((raw.variables[name] for name in names if name in raw.variables), None)
    return found if isinstance(found, str) and found.strip() else None


def flag_problems(settings: Settings, policies: Iterable[Policy], problems: list[str]) -> None:
    """Every flag of every policy, and in strict mode every name that nobody knows."""
    known = tuple(policies)
    for policy in known:
        with noted(problems):
            settings.flags(policy)
    with noted(problems):
        settings.notices(known)
