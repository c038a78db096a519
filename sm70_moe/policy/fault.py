"""Fault: one thing that is wrong in a policy file, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from sm70_moe.policy.contract import Contract, WeightContract
from sm70_moe.policy.document import Evidence, Policy, Reactions
from sm70_moe.policy.feature import Feature
from sm70_moe.policy.lines import KeyPath
from sm70_moe.policy.route import CallConditions, OpenRange, Route
from sm70_moe.policy.wording import one_of, shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ACCEPTED = {
    "string_type": "text in quotes",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "an array",
    "dict_type": "a table",
    "mapping_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_long": "an array of at most {max_length}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "literal_error": "{expected}",
    "policy": "{accepted}",
}
"""Kind of error, as pydantic and `refusal` name it -> what would have been right."""

TABLES: dict[KeyPath, type[BaseModel]] = {
    (): Policy,
    ("contract",): Contract,
    ("contract", "weights"): WeightContract,
    ("features", "*"): Feature,
    ("route", "*"): Route,
    ("route", "*", "tokens"): OpenRange,
    ("route", "*", "call"): CallConditions,
    ("on",): Reactions,
    ("evidence", "*"): Evidence,
}
"""Which keys each table of a policy knows; `*` is any feature, or any place in an array."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Where, what was found and what is accepted; both as text that is ready to print."""

    where: KeyPath
    found: str
    accepted: str
    what: str = ""

    @property
    def text(self) -> str:
        """ "features.qpn_m1.native: found 1, accepted true or false"."""
        place = dotted(self.where)
        what = f"{self.what}, " if self.what else ""
        return f"{place}: {what}found {self.found}, accepted {self.accepted}"


def dotted(where: KeyPath) -> str:
    """ "route[1].call.x"; "policy" for the file itself."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)
    return text.lstrip(".") or "policy"


def fault_of(error: ErrorDetails) -> Fault:
    """Put one error of pydantic into the words of a policy file."""
    where = tuple(key for key in error["loc"] if key != "[key]")
    if error["type"] == "extra_forbidden":
        name = str(where[-1])
        return Fault(where, shown(name), one_of(name, known_keys(where[:-1])), "unknown key")
    if error["type"] == "missing":
        return Fault(where, "nothing", "a value: this key is required", "missing key")
    pattern = ACCEPTED.get(error["type"])
    accepted = pattern.format(**error.get("ctx", {})) if pattern else error["msg"]
    return Fault(where, shown(error["input"]), accepted)


def known_keys(table: KeyPath) -> tuple[str, ...]:
    """Keys that a table may have."""
    general = tuple("*" if isinstance(key, int) or table[:at] == ("features",) else key for at, key in enumerate(table))
    model = TABLES.get(general)
    return tuple(field.alias or name for name, field in model.model_fields.items()) if model else ()
