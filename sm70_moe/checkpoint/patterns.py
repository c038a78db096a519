"""Regular expressions that a checkpoint brings, matched in time linear in the name that they are matched with.

Python's `re` tries every way in which an expression could match, so that a hostile or careless one
takes forever. pydantic's engine is an automaton; it knows neither references to groups nor
look-around. Look-aheads at the beginning, which skip lists do use, are matched by themselves here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from math import prod

from pydantic_core import SchemaError, SchemaValidator, core_schema

from sm70_moe.errors import CheckpointError

LONGEST = 2_000
"""Characters."""
LARGEST_REPEAT = 1_000
"""Of all counted repeats of an expression, multiplied: `a{10}{20}` is 200 times the work of `a`."""

ACCEPTED = (
    f"at most {LONGEST} characters, repeats that multiply to at most {LARGEST_REPEAT}, look-ahead at the beginning "
    "only, no look-behind, no references to groups, no possessive repeats and no sets of sets"
)

TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""An escaped character, a class of characters, or a character by itself."""
COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")
AMBIGUOUS = re.compile(r"(?<!\\)[*+?}]\+|\[\^?\[|&&|--|~~")
"""What Python and the engine understand differently."""


class Pattern:
    """A regular expression in Python's syntax, as far as that can be matched in linear time.

    Raises CheckpointError naming it for any other; `ACCEPTED` tells what that leaves.
    """

    __slots__ = ("_body", "_looks")

    def __init__(self, text: str) -> None:
        _require_bounds(text)
        looks, body = _split(text)
        self._body = _compiled(body, text)
        self._looks = tuple((wanted, _compiled(look, text)) for wanted, look in looks)

    def match(self, name: str) -> bool:
        """Does the expression match from the beginning of the name?"""
        for wanted, look in self._looks:
            if look.isinstance_python(name) is not wanted:
                return False
        return self._body.isinstance_python(name)


@lru_cache(maxsize=1024)
def pattern(text: str) -> Pattern:
    return Pattern(text)


def is_pattern(text: str) -> bool:
    """Is it one that can be matched?"""
    try:
        pattern(text)
    except CheckpointError:
        return False
    return True


def _require_bounds(text: str) -> None:
    if len(text) > LONGEST:
        raise _fault(text, f"{len(text)} characters")
    if prod(_counts(text)) > LARGEST_REPEAT:
        raise _fault(text, "too many repeats")
    if AMBIGUOUS.search(text):
        raise _fault(text, "a possessive repeat or a set of sets")


def _counts(text: str) -> Iterator[int]:
    for low, high in COUNTED.findall(text):
        count = high or low
        # Python refuses to make a number of thousands of digits
        yield max(int(count), 1) if len(count) < len(str(LARGEST_REPEAT)) + 1 else LARGEST_REPEAT + 1


def _split(text: str) -> tuple[list[tuple[bool, str]], str]:
    """Look-aheads at the beginning, (wanted, expression) each, and the rest."""
    body, looks = text.removeprefix("^"), []
    while body.startswith(("(?=", "(?!")):
        end = next((place for place, depth, token in _structure(body) if token == ")" and not depth), None)
        if end is None:
            raise _fault(text, "unclosed group")
        looks.append((body[2] == "=", body[3:end]))
        body = body[end + 1 :]
    if not looks:
        return [], text
    if any(token == "|" and not depth for _, depth, token in _structure(body)):
        raise _fault(text, "a look-ahead in one of several alternatives")
    return looks, body


def _structure(text: str) -> Iterator[tuple[int, int, str]]:
    """Place, depth and character of each parenthesis and bar; a group's own have the depth outside of it."""
    depth = 0
    for found in TOKEN.finditer(text):
        token = found.group()
        depth -= token == ")"
        if token in ("(", ")", "|"):
            yield found.start(), depth, token
        depth += token == "("


def _compiled(part: str, text: str) -> SchemaValidator:
    try:
        # by itself first: "a)|(b" is no expression, though the parentheses below would make it one
        _validator(part)
        return _validator(rf"\A(?:{part})")
    except SchemaError as error:
        raise _fault(text, str(error).strip().splitlines()[-1].strip().removeprefix("error: ")) from error


def _validator(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression, regex_engine="rust-regex", strict=True))


def _fault(text: str, cause: str) -> CheckpointError:
    return CheckpointError(f"config.json: regular expression {text[:200]!r}: {cause}; accepted is {ACCEPTED}")
