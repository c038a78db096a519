from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.policy import policies_folder
from sm70_moe.policy.lines import KeyPath, key_lines, line_of

FORMS = '''\
# a comment with [brackets] and = signs
top = 1
"quoted key" = 'x'   # trailing = comment
'literal' = "a # no comment"
a.b.c = true

[table]
text = """
not = "a key"
[not.a.table]
ends in quotes: \\""""""
after = 2
lit = \'\'\'
neither = 1
\'\'\'\'
more = [
  1,   # first
  [ 2,
    3 ],

  { in = 1, line = { deep = 2 } },
]
dotted . "key" = 1979-05-27T07:32:00Z

  [ table . "sub.table" ]
  x = {}

[[list]]
one = 1
[[list]]
two = 2
[list.inner]
three = 3
[[list.nested]]
[[list.nested]]
four = 4
[["list"]]
five = [ ]
'''


def test_keys_without_a_blank_between_them() -> None:
    """As a machine writes them: nothing after a comma is skipped."""
    tight = "a=[1,2,\n{b=1,c={d=[],e=2}},\n3]\nf={g=1,h=[1,[2]],i=4}\nj=5\n"
    tomllib.loads(tight)
    assert key_lines(tight) == {
        ("a",): 1, ("a", 0): 1, ("a", 1): 1, ("a", 2): 2, ("a", 2, "b"): 2, ("a", 2, "c"): 2, ("a", 2, "c", "d"): 2,
        ("a", 2, "c", "e"): 2, ("a", 3): 3, ("f",): 4, ("f", "g"): 4, ("f", "h"): 4, ("f", "h", 0): 4,
        ("f", "h", 1): 4, ("f", "h", 1, 0): 4, ("f", "i"): 4, ("j",): 5,
    }  # fmt: skip


def test_every_form_of_a_key_is_found() -> None:
    """Dotted, quoted, inline, nested and repeated keys have the line they stand in."""
    tomllib.loads(FORMS)
    assert key_lines(FORMS) == {
        ("top",): 2,
        ("quoted key",): 3,
        ("literal",): 4,
        ("a",): 5,
        ("a", "b"): 5,
        ("a", "b", "c"): 5,
        ("table",): 7,
        ("table", "text"): 8,
        ("table", "after"): 12,
        ("table", "lit"): 13,
        ("table", "more"): 16,
        ("table", "more", 0): 17,
        ("table", "more", 1): 18,
        ("table", "more", 1, 0): 18,
        ("table", "more", 1, 1): 19,
        ("table", "more", 2): 21,
        ("table", "more", 2, "in"): 21,
        ("table", "more", 2, "line"): 21,
        ("table", "more", 2, "line", "deep"): 21,
        ("table", "dotted"): 23,
        ("table", "dotted", "key"): 23,
        ("table", "sub.table"): 25,
        ("table", "sub.table", "x"): 26,
        ("list",): 28,
        ("list", 0): 28,
        ("list", 0, "one"): 29,
        ("list", 1): 30,
        ("list", 1, "two"): 31,
        ("list", 1, "inner"): 32,
        ("list", 1, "inner", "three"): 33,
        ("list", 1, "nested"): 34,
        ("list", 1, "nested", 0): 34,
        ("list", 1, "nested", 1): 35,
        ("list", 1, "nested", 1, "four"): 36,
        ("list", 2): 37,
        ("list", 2, "five"): 38,
    }


def test_windows_line_ends_count_once() -> None:
    """The lines are the same for a file with CR LF."""
    assert key_lines(FORMS.replace("\n", "\r\n")) == key_lines(FORMS)


def test_a_table_has_its_header_even_after_a_table_inside_it() -> None:
    """The header counts, not the earlier mention by `[a.b]`."""
    assert key_lines("[a.b]\nx = 1\n[a]\ny = 1\n") == {
        ("a",): 3,
        ("a", "b"): 1,
        ("a", "b", "x"): 2,
        ("a", "y"): 4,
    }


@pytest.mark.parametrize(
    ("where", "line"),
    [(("a", "b"), 2), (("a", "missing"), 1), (("a", "b", "c", 4), 2), (("missing",), 1), ((), 1)],
)
def test_a_missing_key_has_the_line_of_its_table(where: KeyPath, line: int) -> None:
    """The closest table around it stands in."""
    assert line_of(key_lines("[a]\nb = 1\n"), where) == line


def paths(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    """Every key path of a parsed document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} | {found for key, item in inner for found in paths(item, (*path, key))}


@pytest.mark.parametrize("file", sorted(policies_folder().glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_files_are_located_completely(file: Any) -> None:
    """Every key of a shipped policy is found, in a line that has its name."""
    text = file.read_text()
    lines = key_lines(text)
    assert set(lines) | {()} == paths(tomllib.loads(text))
    for path, line in lines.items():
        if isinstance(path[-1], str):
            assert path[-1] in text.splitlines()[line - 1]


plain_text = st.text(st.characters(exclude_categories=["C"]), max_size=6)
values = st.recursive(
    st.integers(-9, 9) | st.booleans() | plain_text | st.text("a\"'\n\\#]}", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=8,
)


def written(value: Any) -> str:
    """A value as TOML; text with line breaks in three quotes, arrays over several lines."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[ # ]\n" + "".join(f"{written(item)} ,\n" for item in value) + "]"
    if isinstance(value, str) and "\n" in value:
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"""\n{escaped}"""'
    return json.dumps(value, ensure_ascii=False)


@given(st.dictionaries(plain_text, values, max_size=4))
def test_any_document_is_located_completely(document: dict[str, Any]) -> None:
    """Exactly the paths of the document are found, each top key in the line where it was written."""
    text, expected = "", {}
    for key, value in document.items():
        expected[(key,)] = text.count("\n") + 1
        text += f"{json.dumps(key, ensure_ascii=False)} = {written(value)}\n"
    assert tomllib.loads(text) == document
    lines = key_lines(text)
    assert set(lines) | {()} == paths(document)
    assert {path: lines[path] for path in expected} == expected
