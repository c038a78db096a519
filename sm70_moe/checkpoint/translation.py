r"""What Python's parser read in a regular expression, told again in forms that mean the same to an automaton.

Kinds of characters are written out for ASCII (`\w` is 63 characters); `Translation.letters` says that the
answer for other names would hang on them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from re import _constants, _parser  # type: ignore[attr-defined]  # typeshed lacks them; Python's re reads with them
from typing import Any

LARGEST = 4_000
"""Characters and classes of an expression with its repeats written out: the size of the automaton."""
DEEPEST = 50
"""Groups inside one another."""

Node = tuple[Any, Any]

KINDS = {
    _constants.CATEGORY_DIGIT: "0-9",
    _constants.CATEGORY_SPACE: r"\t-\r\x1c-\x20",
    _constants.CATEGORY_WORD: "0-9A-Z_a-z",
}
NO_KINDS = {
    _constants.CATEGORY_NOT_DIGIT: _constants.CATEGORY_DIGIT,
    _constants.CATEGORY_NOT_SPACE: _constants.CATEGORY_SPACE,
    _constants.CATEGORY_NOT_WORD: _constants.CATEGORY_WORD,
}
PLACES = {
    _constants.AT_BEGINNING: r"\A",
    _constants.AT_BEGINNING_STRING: r"\A",
    _constants.AT_END: r"\z",
    _constants.AT_END_STRING: r"\z",
    _constants.AT_BOUNDARY: r"\b",
    _constants.AT_NON_BOUNDARY: r"\B",
}
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT)
NAMES = {
    _constants.GROUPREF: "a reference to a group (backreferences)",
    _constants.GROUPREF_EXISTS: "a reference to a group (backreferences)",
    _constants.ASSERT: "look-around elsewhere than at the beginning",
    _constants.ASSERT_NOT: "look-around elsewhere than at the beginning",
    _constants.ATOMIC_GROUP: "an atomic group",
    _constants.POSSESSIVE_REPEAT: "a possessive repeat",
}


class Untranslatable(ValueError):
    """An expression that an automaton cannot match."""


@dataclass(frozen=True, slots=True)
class Look:
    """A look-ahead at the beginning: must it match, and what."""

    wanted: bool
    body: str


@dataclass(frozen=True, slots=True)
class Translation:
    """An expression's look-aheads at the beginning and the rest; `letters`: it asks what is a letter, or a line."""

    looks: tuple[Look, ...]
    body: str
    letters: bool


def translate(text: str) -> Translation:
    """Raises Untranslatable, or what Python's parser raises: re.error, OverflowError, RecursionError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "possible nested set": read as Python reads it today
        tree = _parser.parse(text)
    writer = Writer()
    writer.letters = bool(tree.state.flags & re.MULTILINE)
    nodes, looks = list(tree), []
    ignored = bool(tree.state.flags & re.IGNORECASE)
    dot = bool(tree.state.flags & re.DOTALL)
    while nodes and (nodes[0] == (_constants.AT, _constants.AT_BEGINNING) or nodes[0][0] in LOOKS):
        kind, value = nodes.pop(0)
        if kind in LOOKS:
            if value[0] != 1:
                raise Untranslatable("look-behind")
            looks.append(Look(kind is _constants.ASSERT, writer.whole(value[1], ignored, dot)))
    body = writer.whole(nodes, ignored, dot)
    return Translation(tuple(looks), body, writer.letters)


class Writer:
    """Writes nodes of Python's parser; counts what the automaton will have."""

    def __init__(self) -> None:
        self.letters = False
        self.size = 0

    def whole(self, nodes: Iterable[Node], ignored: bool, dot: bool) -> str:
        self.letters |= ignored
        return self.sequence(nodes, ignored, dot, 1)

    def sequence(self, nodes: Iterable[Node], ignored: bool, dot: bool, times: int) -> str:
        return "".join(self.node(kind, value, ignored, dot, times) for kind, value in nodes)

    def node(self, kind: Any, value: Any, ignored: bool, dot: bool, times: int) -> str:
        """One node, which stands `times` times in the automaton."""
        self._grow(times)
        if kind is _constants.LITERAL:
            return self.one(character(value), ignored)
        if kind is _constants.NOT_LITERAL:
            return self.one(f"[^{character(value)}]", ignored)
        if kind is _constants.ANY:
            return "(?s:.)" if dot else r"[^\n]"
        if kind is _constants.IN:
            return self.one(self.members(value), ignored)
        if kind is _constants.BRANCH:
            return f"(?:{'|'.join(self.sequence(branch, ignored, dot, times) for branch in value[1])})"
        if kind is _constants.SUBPATTERN:
            return self.group(value, ignored, dot, times)
        if kind in REPEATS:
            return self.repeat(value, ignored, dot, times)
        if kind is _constants.AT:
            self.letters |= PLACES[value] not in (r"\A",)
            return PLACES[value]
        raise Untranslatable(NAMES.get(kind, str(kind)))

    def one(self, text: str, ignored: bool) -> str:
        if not ignored:
            return text
        if re.search(r"\\x\{(?!..\})|\\x\{[89a-f].\}", text):
            raise Untranslatable("ignored case of letters outside of ASCII")
        return f"(?i:{text})"

    def members(self, items: Sequence[Node]) -> str:
        """A class of characters."""
        parts = []
        for kind, value in items:
            self._grow(1)
            if kind is _constants.NEGATE:
                continue
            if kind is _constants.LITERAL:
                parts.append(character(value))
            elif kind is _constants.RANGE:
                parts.append(f"{character(value[0])}-{character(value[1])}")
            else:
                self.letters = True
                parts.append(KINDS[value] if value in KINDS else f"[^{KINDS[NO_KINDS[value]]}]")
        negated = items[0][0] is _constants.NEGATE
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def group(self, value: Any, ignored: bool, dot: bool, times: int) -> str:
        _, added, removed, nodes = value
        ignored = (ignored or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
        dot = (dot or bool(added & re.DOTALL)) and not removed & re.DOTALL
        self.letters |= ignored
        return f"(?:{self.sequence(nodes, ignored, dot, times)})"

    def repeat(self, value: Any, ignored: bool, dot: bool, times: int) -> str:
        low, high, nodes = value
        endless = high is _constants.MAXREPEAT
        body = self.sequence(nodes, ignored, dot, times * max(low if endless else high, 1))
        return f"(?:{body}){{{low},{'' if endless else high}}}"

    def _grow(self, times: int) -> None:
        self.size += times
        if self.size > LARGEST:
            raise Untranslatable(f"more than {LARGEST} steps (repeats)")


def character(code: int) -> str:
    """A character that means itself, wherever it stands."""
    if 0xD800 <= code <= 0xDFFF:
        raise Untranslatable(f"half of a character, U+{code:04X}")
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:02x}}}"
