"""In which line of a TOML text a key stands; Python's parser does not say."""

from __future__ import annotations

import re
import tomllib

KeyPath = tuple[str | int, ...]
"""Keys from the top; an int is a place in an array."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_LONG_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''(?:[^']|'(?!''))*'{3,5}", re.DOTALL)
_BARE_VALUE = re.compile(r"[^,\]}\n#]*")


def line_of(lines: dict[KeyPath, int], where: KeyPath) -> int:
    """Line of a key; of the closest table around it if the key is not there."""
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where, 1)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line of every key and array item of a text that `tomllib` has already accepted."""
    return _Scan(text).lines


class _Scan:
    """One pass over the text. It trusts the syntax: only positions are of interest."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[KeyPath, int] = {}
        self.items: dict[KeyPath, int] = {}  # array of tables -> place of its last one
        self.counted, self.line = 0, 1
        table: KeyPath = ()
        while self.skip() < len(text):
            table = self.header() if text[self.at] == "[" else self.pair(table)

    def skip(self) -> int:
        """Go past blanks and comments."""
        return self.take(_BLANK)[1]

    def take(self, pattern: re.Pattern[str]) -> tuple[str, int]:
        """Go past what the pattern matches here; that text, and the place behind it."""
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return (found.group() if found else ""), self.at

    def mark(self, path: KeyPath) -> KeyPath:
        """Note the line of this path, and of tables around it that no header of their own has named."""
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self.line)
        return path

    def header(self) -> KeyPath:
        """`[table]` or `[[array of tables]]`."""
        double = self.text.startswith("[[", self.at)
        self.at += 1 + double
        path: KeyPath = ()
        keys = self.keys()
        for place, key in enumerate(keys):
            path = (*path, key)
            if double and place == len(keys) - 1:
                self.items[path] = self.items.get(path, -1) + 1
            if path in self.items:
                path = (*path, self.items[path])
        self.mark(path)
        self.lines[path] = self.line  # a sub-table may have named it before
        self.skip()
        self.at += 1 + double
        return path

    def keys(self) -> tuple[str, ...]:
        """A dotted key."""
        found = []
        while True:
            self.skip()
            found.append(self.key())
            self.skip()
            if self.text[self.at] != ".":
                return tuple(found)
            self.at += 1

    def key(self) -> str:
        quote = self.text[self.at]
        if quote == "'":
            return self.take(_LITERAL)[0][1:-1]
        if quote == '"':
            return unquoted(self.take(_BASIC)[0])
        return self.take(_BARE_KEY)[0]

    def pair(self, table: KeyPath) -> KeyPath:
        """`key = value`; gives the table back that it stands in."""
        self.skip()
        start = self.at
        path = (*table, *self.keys())
        behind, self.at = self.at, start
        self.mark(path)
        self.at = behind + 1
        self.value(path)
        return table

    def value(self, path: KeyPath) -> None:
        self.skip()
        opening = self.text[self.at]
        if opening == "[":
            self.array(path)
        elif opening == "{":
            self.inline_table(path)
        elif opening in "\"'":
            long = self.text.startswith(opening * 3, self.at)
            basic, literal = (_LONG_BASIC, _LONG_LITERAL) if long else (_BASIC, _LITERAL)
            self.take(basic if opening == '"' else literal)
        else:
            self.take(_BARE_VALUE)

    def array(self, path: KeyPath) -> None:
        self.at += 1
        place = 0
        while self.text[self.skip()] != "]":
            self.value(self.mark((*path, place)))
            self.comma()
            place += 1
        self.at += 1

    def inline_table(self, path: KeyPath) -> None:
        self.at += 1
        while self.text[self.skip()] != "}":
            self.pair(path)
            self.comma()
        self.at += 1

    def comma(self) -> None:
        if self.text[self.skip()] == ",":
            self.at += 1


def unquoted(quoted: str) -> str:
    """Content of a basic string; `tomllib` resolves its escapes."""
    if "\\" not in quoted:
        return quoted[1:-1]
    return str(tomllib.loads(f"key = {quoted}")["key"])
