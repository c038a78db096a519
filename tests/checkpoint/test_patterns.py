"""Regular expressions of skip lists: what Python would match, and nothing that could take forever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.checkpoint.patterns import LARGEST_REPEAT, LONGEST, Pattern, is_pattern, pattern
from sm70_moe.errors import CheckpointError

MODULE = "model.layers.17.mlp.experts.3.gate_proj"
SEEN = [
    ".*mlp.gate$",
    r".*\.layers\.(1[0-9]|2[0-3])\..*",
    r"model\.layers\.\d+\.mlp\.experts\.\d{1,3}\.(gate|up)_proj",
    r".*experts\.(?:0|1|2)\b",
    r"^(?!.*experts).*",
    r"^(?!.*shared)(?=.*experts).*_proj$",
    r"(?!lm_head|visual\.).*gate",
    r"(?!model\.(layers|norm)\.1[^0-9]).*",
    r"(?i).*MLP\.Gate$",
    "(?!.*experts)",
    "gate",
    "",
]
NAMES = [
    MODULE,
    "model.layers.1.mlp.gate",
    "lm_head",
    "visual.blocks.0.mlp.gate",
    "model.layers.3.mlp.shared_expert.up",
]


@pytest.mark.parametrize("text", SEEN)
@pytest.mark.parametrize("name", NAMES)
def test_expressions_as_they_are_written(text: str, name: str) -> None:
    """The same answer as Python's `re.match`."""
    assert Pattern(text).match(name) is (re.match(text, name) is not None)


ATOM = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\w"])
SUFFIX = st.sampled_from(["", "*", "+", "?", "{1,2}", "*?"])
SIMPLE = st.tuples(ATOM, SUFFIX).map("".join)
TEXT = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
    ),
    max_leaves=6,
)
LOOK = st.one_of(st.just(""), TEXT.map("(?!{})".format), TEXT.map("(?={})".format))


@given(LOOK, TEXT, st.text("ab.", max_size=8))
def test_any_expression_matches_what_python_matches(look: str, text: str, name: str) -> None:
    """Classes, alternatives, repeats and look-aheads at the beginning."""
    assert Pattern(look + text).match(name) is (re.match(look + text, name) is not None)


@pytest.mark.parametrize(
    "text",
    ["([a-z.0-9_]+)+!", "(m+)+$", "(a|a|.)*!", ".*.*.*.*.*.*.*.*!", "(.|.)" * 60 + "!", "(.?){60}!"],
)
def test_no_expression_takes_forever(text: str) -> None:
    """Each of these tries millions of millions of ways in Python."""
    assert not Pattern(text).match(MODULE * 50)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("(", "unclosed"),
        ("(?!a", "unclosed"),
        ("[a", "unclosed"),
        ("*", "repetition"),
        ("a)|(b", "unopened"),
        ("(" * 900 + ")" * 900, "250"),
        ("a" * (LONGEST + 1), str(LONGEST)),
        (f"a{{{LARGEST_REPEAT + 1}}}", "repeats"),
        ("a{99999999999999999999}", "repeats"),
        (f"a{{{'9' * 1900}}}", "repeats"),
        ("((a{1,40}){1,40}){1,40}", "repeats"),
        (r"(a)\1", "backreferences"),
        ("a(?!b)", "look"),
        ("(?<=a)b", "look"),
        ("(?!a)b|c", "alternatives"),
        ("a*+b", "possessive"),
        ("[[a]]", "sets"),
    ],
)
def test_what_cannot_be_matched_is_refused(text: str, cause: str) -> None:
    """With the expression, the cause, and what is accepted."""
    with pytest.raises(CheckpointError) as caught:
        pattern(text)
    assert not is_pattern(text)
    for part in ("config.json", repr(text[:200]), cause, str(LONGEST)):
        assert part in str(caught.value)
