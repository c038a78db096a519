"""Where settings come from: variables of the environment and of a `.env` file, read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from dotenv.parser import parse_stream
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from sm70_moe import opening
from sm70_moe.errors import SettingsError
from sm70_moe.files import text_of
from sm70_moe.settings.variables import SETTINGS, is_ours

ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable as it was given; `place` is "environment" or ".env file PATH"."""

    name: str
    value: str
    place: str = ENVIRONMENT

    @property
    def source(self) -> str:
        joint = " " if self.place == ENVIRONMENT else ": "
        return f"{self.place}{joint}{self.name}"


Given = tuple[Variable, ...]
"""The variables under our prefixes, at most one of a name, places in order of precedence."""


def read_variables(environment: Mapping[str, str], env_file: Path | None) -> Given:
    """Take our variables out of the environment, then those that only the file has.

    SettingsError if the file is missing, unreadable or malformed.
    """
    given = [Variable(name, value) for name, value in sorted(environment.items()) if is_ours(name)]
    taken = {variable.name for variable in given}
    if env_file is not None:
        place = f".env file {env_file}"
        given += [Variable(n, v, place) for n, v in sorted(read_env_file(env_file).items()) if n not in taken]
    return tuple(given)


LARGEST = 1 << 20
"""Bytes of a `.env` file."""


def read_env_file(path: Path) -> dict[str, str]:
    """Our variables in a `.env` file, without `${...}` expansion; the last line of a name counts.

    Errors give line numbers, not lines: such files hold other programs' secrets.
    """
    values: dict[str, str] = {}
    wrong: list[str] = []
    try:
        for binding in parse_stream(StringIO(text_of(opening.content(path, LARGEST)), newline=None)):
            if binding.error or (binding.key and is_ours(binding.key) and binding.value is None):
                wrong.append(str(binding.original.line))
            elif binding.key and is_ours(binding.key) and binding.value is not None:
                values[binding.key] = binding.value
    except (OSError, ValueError) as error:
        raise SettingsError(f".env file {path}: {error}; accepted is a readable UTF-8 file") from error
    if wrong:
        raise SettingsError(f".env file {path}: line {', '.join(wrong)} is not NAME=VALUE")
    return values


def choose(given: Given, names: Sequence[str]) -> Variable | None:
    """The variable that decides among the names of one setting, or None if none is set.

    SettingsError if one place gives two of the names different values. Across places there is no
    conflict: the environment goes before the file.
    """
    candidates = [variable for variable in given if variable.name in names]
    if not candidates:
        return None
    rivals = sorted((v for v in candidates if v.place == candidates[0].place), key=lambda v: names.index(v.name))
    if len({variable.value for variable in rivals}) > 1:
        pairs = " and ".join(f"{variable.name}={variable.value!r}" for variable in rivals)
        raise SettingsError(f"{pairs} contradict each other ({rivals[0].place}): set one of them, or both alike")
    return rivals[0]


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Add a SettingsError to the list instead of raising it, so that several can be told at once."""
    try:
        yield
    except SettingsError as problem:
        problems += problem.lines


class VariableSource(PydanticBaseSettingsSource):
    """Hands pydantic-settings the variable that decides each field; the field parses its text.

    A field whose variables contradict each other gets none: `Settings` reports that with everything
    else that is wrong.
    """

    def __init__(self, settings_cls: type[BaseSettings], given: Given) -> None:
        super().__init__(settings_cls)
        self.chosen: dict[str, Variable] = {}
        for row in SETTINGS:
            with noted([]):
                if variable := choose(given, row.names):
                    self.chosen[row.setting] = variable

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Variable | None, str, bool]:
        return self.chosen.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields.items()
        values = {name: self.get_field_value(field, name)[0] for name, field in fields}
        return {name: variable for name, variable in values.items() if variable is not None}
