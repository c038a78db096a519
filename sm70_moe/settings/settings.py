"""What the operator wants, read once: settings and flags, each with where it came from.

An argument goes before the environment, the environment before a `.env` file, and that before the
default. Nothing is read at import, and nothing again after `Settings.from_env`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError, ValidationInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from sm70_moe.errors import SettingsError
from sm70_moe.settings.flags import FlaggedPolicy, FlagState, FlagValue, parse_flag, parse_switch
from sm70_moe.settings.given import ENVIRONMENT, Given, Variable, VariableSource, choose, noted, read_variables
from sm70_moe.settings.layerlists import LayerList
from sm70_moe.settings.parsing import (
    MOST_RESIDENT_TOKENS,
    parse_assumption,
    parse_name,
    parse_path,
    parse_place,
    parse_take,
    parse_tokens,
    rooted,
)
from sm70_moe.settings.variables import (
    FLAGS,
    KNOWN_NAMES,
    RETIRED,
    SETTINGS,
    Notice,
    NoticeKind,
    is_foreign,
    is_ours,
    nearest_name,
    own_name,
    report_names,
)

STATES = {state.value: state for state in FlagState}

FlagArguments = tuple[tuple[str, str], ...]
"""Features and the text of their flags, as arguments gave them."""


def from_text(parse: Callable[[str, str], object]) -> BeforeValidator:
    """Make a field take a variable, or an argument's text, through `parse`; typed values pass on."""

    def read(value: object, info: ValidationInfo) -> object:
        if isinstance(value, str):
            value = Variable(f"argument {info.field_name}", value)
        if not isinstance(value, Variable):
            return value
        return accept(parse, value.name, value.value)

    return BeforeValidator(read)


class Problems(ValueError):
    """What pydantic collects: a line for each thing that is wrong."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(lines))


def accept(parse: Callable[[str, str], object], name: str, text: str) -> object:
    """Call `parse` and turn its SettingsError into the ValueError that pydantic collects."""
    try:
        return parse(name, text)
    except SettingsError as problem:
        raise Problems(problem.lines) from problem


def check_given(given: Given) -> Given:
    """Refuse contradicting names and malformed flags, all of them at once."""
    problems: list[str] = []
    for row in (*SETTINGS, *FLAGS):
        with noted(problems):
            choose(given, row.names)
    flag_names = {name for row in FLAGS for name in row.names}
    for variable in given:
        if variable.name in flag_names:
            with noted(problems):
                parse_flag(variable.name, variable.value)
    if problems:
        raise Problems(problems)
    return given


def check_flags(flags: FlagArguments) -> FlagArguments:
    """Refuse malformed flags among the arguments."""
    problems: list[str] = []
    for name, text in flags:
        with noted(problems):
            parse_flag(f"argument {name}", text)
    if problems:
        raise Problems(problems)
    return flags


Place = Annotated[Path | None, from_text(parse_path), AfterValidator(rooted)]


@dataclass(frozen=True, slots=True)
class Change:
    """A variable that differs between two moments; None is "not set"."""

    name: str
    before: str | None
    after: str | None


class Settings(BaseSettings):
    """The operator's settings, frozen.

    Made by `from_env`, or by hand for tests: `Settings(strict=True)` reads nothing but its
    arguments. An argument may have its field's type, or be text as the variable would have it.
    Every value that is not accepted is named in one SettingsError.
    """

    model_config = SettingsConfigDict(frozen=True, strict=True, extra="forbid")

    given: Annotated[Given, AfterValidator(check_given)] = ()
    flag_arguments: Annotated[FlagArguments, AfterValidator(check_flags)] = ()

    policy: Annotated[str | None, from_text(parse_name)] = None
    """Name of a shipped policy, or path of a file; None chooses by a layer's geometry."""
    journal: Place = None
    """Where decisions are recorded; None writes no file."""
    cache: Place = None
    """Folder of prepared banks; None prepares them at every start."""
    strict: Annotated[bool, from_text(parse_switch)] = False
    """Unknown and retired variables are errors."""
    layer_allow: Annotated[LayerList | None, from_text(LayerList.parse)] = None
    """The only layers whose features may be admitted; None allows all."""
    layer_deny: Annotated[LayerList, from_text(LayerList.parse)] = LayerList()
    """Layers whose features are not admitted; wins over `layer_allow`."""
    kernels: Place = None
    """Folder with a native build of `build-kernels`; None is the package's own."""
    kernel_cache: Annotated[Path | bool, from_text(parse_place), AfterValidator(rooted)] = True
    """Folder of kernels that are compiled on this machine; True is the user's cache directory, False compiles none."""
    dependent_launch: Annotated[bool, from_text(parse_switch)] = True
    """Kernels of one call may overlap where the device can do that and its self-test passes."""
    proof: Annotated[bool, from_text(parse_switch)] = True
    """Native routes are tried on a layer's own banks before they are kept."""
    assume: Annotated[str | None, from_text(parse_assumption)] = None
    """What is taken for what is not known of a layer's arithmetic; None takes nothing."""
    take: Annotated[str, from_text(parse_take)] = "native"
    """Layers taken from an engine that can run them itself: with native routes for all its calls, "all", or "none"."""
    model_types: Place = None
    """A file with rows of model types before the package's (`checkpoint/model_types.toml`)."""
    persistent_tokens: Annotated[int, from_text(parse_tokens), Field(ge=0, le=MOST_RESIDENT_TOKENS)] = 0
    """Tokens that resident scratch is sized for; 0 derives it from what the engine will send."""

    _arguments: frozenset[str] = PrivateAttr(frozenset())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(*problem_lines(error)) from error
        self._arguments = frozenset(values) & {row.setting for row in SETTINGS}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the variables that were handed in; never the live environment."""
        given = init_settings().get("given", ())
        return init_settings, VariableSource(settings_cls, given)

    @classmethod
    def from_env(
        cls,
        mapping: Mapping[str, str] | None = None,
        *,
        env_file: Path | None = None,
        flags: Mapping[str, str] | None = None,
        **values: Any,
    ) -> Settings:
        """Read the environment (or `mapping` instead of it) once, and a `.env` file if one is given.

        `flags` maps features to `0` or `1`; `values` are fields, None meaning "not given". Raises
        SettingsError with every problem that was found.
        """
        given = read_variables(os.environ if mapping is None else mapping, env_file)
        arguments = {name: value for name, value in values.items() if value is not None}
        return cls(given=given, flag_arguments=tuple(sorted((flags or {}).items())), **arguments)

    @property
    def variables(self) -> Mapping[str, str]:
        """Every variable under our prefixes that was given, raw, known or not."""
        return MappingProxyType({variable.name: variable.value for variable in self.given})

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each field's value came from, in the words of `FlagValue.source`; else "default"."""
        chosen = VariableSource(type(self), self.given).chosen
        found = {row.setting: "default" for row in SETTINGS}
        found |= {name: variable.source for name, variable in chosen.items()}
        found |= dict.fromkeys(self._arguments, "argument")
        return MappingProxyType(found)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the variables and the arguments; where a variable stood does not count."""
        arguments = {name: str(getattr(self, name)) for name in self._arguments}
        content = [dict(self.variables), dict(self.flag_arguments), arguments]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def flag(self, name: str, env: Sequence[str], unset: FlagState) -> FlagValue:
        """The state of one feature's flag, from `env` and `SM70_MOE_<NAME>`, or from an argument.

        SettingsError if the deciding value is not `0` or `1`, or if two names contradict each other.
        """
        variable = choose(self.given, (*env, own_name(name))) if self.given else None
        argument = dict(self.flag_arguments).get(name) if self.flag_arguments else None
        if argument is not None:
            return FlagValue(parse_flag(f"argument {name}", argument), "argument")
        if variable is not None:
            return FlagValue(parse_flag(variable.name, variable.value), variable.source)
        return FlagValue(unset, "unset")

    def flags(self, policy: FlaggedPolicy) -> Mapping[str, FlagValue]:
        """The flags of all features of a policy; one SettingsError names everything that is wrong."""
        problems: list[str] = []
        values: dict[str, FlagValue] = {}
        for name, feature in policy.features.items():
            try:  # not `noted`: this runs for every layer
                values[name] = self.flag(name, feature.env, STATES[feature.unset])
            except SettingsError as problem:
                problems += problem.lines
        if problems:
            raise SettingsError(*problems)
        return MappingProxyType(values)

    def undeclared(self, policy: FlaggedPolicy) -> Mapping[str, FlagValue]:
        """Known flags that are set under a name which this policy does not have, by that name.

        A `1` cannot be met for a layer of this policy, and a `0` has no effect on the feature that
        the policy has under another name: neither must be dropped in silence. A `0` for what the
        policy does not have at all is met already, and left out.
        """
        if not self.given and not self.flag_arguments:
            return MappingProxyType({})
        features = {name: row.setting for row in FLAGS for name in row.names}
        for feature, declared in policy.features.items():
            for name in (*declared.env, own_name(feature)):
                features.pop(name, None)
        found = {
            variable.name: FlagValue(parse_flag(variable.name, variable.value), variable.source)
            for variable in self.given
            if variable.name in features
            and (parse_switch(variable.name, variable.value) or features[variable.name] in policy.features)
        }
        for feature, text in self.flag_arguments:
            if feature not in policy.features and parse_switch(f"argument {feature}", text):
                found[feature] = FlagValue(FlagState.REQUIRE, "argument")
        return MappingProxyType(found)

    def notices(self, policies: Iterable[FlaggedPolicy]) -> tuple[Notice, ...]:
        """Variables, and flags among the arguments, that neither this package nor a policy knows.

        In strict mode, SettingsError names them all; those of container platforms are no error.
        """
        features = {row.setting for row in FLAGS}
        known = set(KNOWN_NAMES)
        for policy in policies:
            features |= policy.features.keys()
            for name, feature in policy.features.items():
                known |= {*feature.env, own_name(name)}
        found = report_names(self.variables, known, RETIRED)
        for name, _ in self.flag_arguments:
            if name not in features:
                found += (Notice(NoticeKind.UNKNOWN, (f"argument {name}",), nearest_name(name, features)),)
        errors = [notice.text for notice in found if notice.kind is not NoticeKind.CONTAINER]
        if self.strict and errors:
            raise SettingsError(*errors)
        return found

    def changes(self, now: Settings | Mapping[str, str], aliases: Collection[str] = ()) -> tuple[Change, ...]:
        """Variables that were set, unset or edited since; a mapping is the environment as it is now.

        With a mapping, what a `.env` file gave counts as unchanged. `aliases` are names that policies read;
        an engine's own variables are left out.
        """
        before, known = self.variables, {*KNOWN_NAMES, *aliases}
        if isinstance(now, Settings):
            after = now.variables
        else:
            unread = {variable.name: variable.value for variable in self.given if variable.place != ENVIRONMENT}
            after = unread | {name: value for name, value in now.items() if is_ours(name)}
        return tuple(
            Change(name, before.get(name), after.get(name))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name) and not is_foreign(name, known)
        )

    def layer_exclusion(self, index: int | None) -> str | None:
        """Why the lists exclude a layer: "denied", "not allowed" or "unknown" (a list, but no index).

        None if they do not. A layer on both lists is denied.
        """
        if index is None:
            return "unknown" if self.layer_deny or self.layer_allow is not None else None
        if index in self.layer_deny:
            return "denied"
        if self.layer_allow is not None and index not in self.layer_allow:
            return "not allowed"
        return None


def problem_lines(error: ValidationError) -> list[str]:
    """One line for each problem; those of our own parsers already name everything."""
    lines: list[str] = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, Problems):
            lines += cause.lines
        elif isinstance(cause, ValueError):
            lines.append(str(cause))
        else:
            place = ".".join(str(part) for part in problem["loc"])
            lines.append(f"argument {place}={problem['input']!r}: {problem['msg']}")
    return lines
