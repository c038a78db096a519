"""Settings of one engine: `--additional-config '{"sm70_moe": {...}}'` before the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sm70_moe.engines.vllm.names import SECTION
from sm70_moe.errors import SettingsError
from sm70_moe.settings.settings import Settings
from sm70_moe.settings.variables import SETTINGS, nearest_name

FLAGS = "flags"
"""The key whose table has flags by feature; every other key is a setting by its field's name."""

KEYS = (FLAGS, *(row.setting for row in SETTINGS))


def read_settings(additional: object) -> Settings:
    """The settings of an engine with this `additional_config`; arguments go before the environment.

    Raises SettingsError naming key or variable, value and what is accepted.
    """
    table = section(additional)
    for key in table:
        if key not in KEYS:
            near = nearest_name(key, KEYS)
            meant = f"; did you mean {near}?" if near else ""
            raise SettingsError(f"--additional-config: {SECTION}.{key} is not known{meant} Accepted: {', '.join(KEYS)}")
    flags = table.get(FLAGS, {})
    if not isinstance(flags, Mapping):
        raise SettingsError(f"--additional-config: {SECTION}.{FLAGS} is {flags!r}; accepted is a table of features")
    values = {key: value for key, value in table.items() if key != FLAGS}
    return Settings.from_env(flags={name: as_text(value) for name, value in flags.items()}, **values)


def section(additional: object) -> Mapping[str, Any]:
    """Our table; empty where there is none."""
    found = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(found, Mapping):
        raise SettingsError(f"--additional-config: {SECTION} is {found!r}; accepted is a table")
    return found


def as_text(value: object) -> str:
    """A flag as the variable would have it: JSON's 1 is "1", its true is "true", which no flag accepts."""
    return value if isinstance(value, str) else json.dumps(value)
