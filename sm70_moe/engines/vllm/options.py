"""Settings of one engine: `--additional-config '{"sm70_moe": {...}}'` before the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sm70_moe.engines.vllm.names import SECTION
from sm70_moe.errors import SettingsError
from sm70_moe.policy import read_operator
from sm70_moe.settings.flags import parse_flag
from sm70_moe.settings.given import Variable, noted
from sm70_moe.settings.settings import Settings
from sm70_moe.settings.variables import FLAGS as FLAG_ROWS
from sm70_moe.settings.variables import SETTINGS, misspells, nearest_name

FLAGS = "flags"
"""The key whose table has flags by feature; every other key is a setting by its field's name."""

KEYS = (FLAGS, *(row.setting for row in SETTINGS))
OPTION = "--additional-config"


def read_settings(additional: object) -> Settings:
    """The settings of an engine with this `additional_config`; arguments go before the environment.

    One SettingsError names every key or variable that is wrong, its value and what is accepted. PolicyError
    where only a policy is wrong.
    """
    table = section(additional)
    flags = table.get(FLAGS, {})
    if not isinstance(flags, Mapping):
        raise SettingsError(f"{OPTION}: {SECTION}.{FLAGS} is {flags!r}; accepted is a table of features")
    problems = [unknown(f"{SECTION}.{key}", key, KEYS) for key in table if key not in KEYS]
    texts = {name: as_text(value) for name, value in flags.items()}
    for name, text in texts.items():
        with noted(problems):
            parse_flag(f"{OPTION}: {SECTION}.{FLAGS}.{name}", text)
    if problems:
        raise SettingsError(*problems)
    values: dict[str, Any] = {
        key: given(key, value) for key, value in table.items() if key != FLAGS and value is not None
    }
    settings, policies = read_operator(settings=Settings.from_env(flags=texts, **values))
    known = {row.setting for row in FLAG_ROWS} | {name for policy in policies for name in policy.features}
    problems = [unknown(f"{SECTION}.{FLAGS}.{name}", name, sorted(known)) for name in texts if name not in known]
    if problems:
        raise SettingsError(*problems)
    return settings


def unknown(place: str, key: str, accepted: Any) -> str:
    near = nearest_name(key, accepted)
    meant = f"; did you mean {near}?" if near else "."
    return f"{OPTION}: {place} is not known{meant} Accepted: {', '.join(accepted)}"


def section(additional: object) -> Mapping[str, Any]:
    """Our table; empty where there is none. SettingsError for one under a name that is nearly ours."""
    if not isinstance(additional, Mapping):
        return {}
    for key in additional:
        if key != SECTION and misspells(str(key).lower().replace("-", "_"), SECTION):
            raise SettingsError(f"{OPTION}: {key!r} is not known; accepted is {SECTION!r}")
    found = additional.get(SECTION, {})
    if not isinstance(found, Mapping):
        raise SettingsError(f"{OPTION}: {SECTION} is {found!r}; accepted is a table")
    return found


def given(key: str, value: object) -> Variable:
    """A value with its place, as the variable would have it: a list is its items with commas between."""
    items = value if isinstance(value, list) else [value]
    return Variable(f"{OPTION}: {SECTION}.{key}", ",".join(map(as_text, items)))


def as_text(value: object) -> str:
    """A flag as the variable would have it: JSON's 1 is "1", its true is "true", which no flag accepts."""
    return value if isinstance(value, str) else json.dumps(value)
