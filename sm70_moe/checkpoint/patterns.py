"""Regular expressions that a checkpoint brings: what Python's `re` would match, in time linear in the name.

Whoever wrote a skip list had Python's `re` read it. So Python's own parser reads it here too, and what it
read is told to an automaton in the few forms that both understand alike (`translation`). Python's own
matching tries every way in which an expression could match, so that a hostile or careless one takes for
ever; pydantic's engine does not, but knows neither references to groups nor look-around. Look-aheads at the
beginning, which skip lists do use, are matched by themselves.
"""

from __future__ import annotations

import re
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

from sm70_moe.checkpoint.translation import DEEPEST, LARGEST, Untranslatable, translate
from sm70_moe.errors import CheckpointError

LONGEST = 2_000
"""Characters."""

ACCEPTED = (
    f"what Python's re accepts, at most {LONGEST} characters, {LARGEST} steps with repeats written out and {DEEPEST} "
    "groups inside one another, look-ahead at the beginning only, no look-behind, no references to groups, no "
    "possessive repeats or atomic groups"
)

GROUP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)
"""An escaped character or a class of characters, in which parentheses mean themselves, or a parenthesis."""


class Pattern:
    """A regular expression in Python's syntax, as far as that can be matched in linear time.

    Raises CheckpointError naming it for any other; `ACCEPTED` tells what that leaves.
    """

    __slots__ = ("_body", "_letters", "_looks", "_text")

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise _fault(text, f"{len(text)} characters")
        if _depth(text) > DEEPEST:
            raise _fault(text, "groups are nested too deeply")
        try:
            found = translate(text)
            self._body = _compiled(found.body)
            self._looks = tuple((look.wanted, _compiled(look.body)) for look in found.looks)
        except (Untranslatable, re.error, OverflowError, RecursionError) as error:
            raise _fault(text, str(error)) from error
        except SchemaError as error:
            raise _fault(text, str(error).strip().splitlines()[-1].strip().removeprefix("error: ")) from error
        self._letters, self._text = found.letters, text

    def match(self, name: str) -> bool:
        r"""Does the expression match from the beginning of the name?

        Raises CheckpointError for a name outside of ASCII, or of several lines, where the answer hangs on what
        is a letter (`\w`, `\b`, ignored case), or on where a line ends.
        """
        if self._letters and not (name.isascii() and "\n" not in name):
            raise CheckpointError(
                f"config.json: regular expression {self._text[:200]!r} against {name[:200]!r}: expected a name in "
                "ASCII of one line, since the expression asks for kinds of letters, ignored case or the end of a line"
            )
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


def _depth(text: str) -> int:
    """How many groups stand inside one another at most; of an expression that is none, any number."""
    depth = deepest = 0
    for found in GROUP.finditer(text):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        deepest = max(deepest, depth)
    return deepest


def _compiled(body: str) -> SchemaValidator:
    return SchemaValidator(
        core_schema.str_schema(pattern=rf"\A(?:{body})", regex_engine="rust-regex", strict=True),
    )


def _fault(text: str, cause: str) -> CheckpointError:
    return CheckpointError(f"config.json: regular expression {text[:200]!r}: {cause}; accepted is {ACCEPTED}")
