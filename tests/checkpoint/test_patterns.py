"""Regular expressions of skip lists: what Python would match, and nothing that could take forever."""

from __future__ import annotations

import re

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70_moe.checkpoint.patterns import LONGEST, Pattern, is_pattern, pattern
from sm70_moe.checkpoint.translation import DEEPEST, LARGEST
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


PIECES = [
    "a",
    "b",
    "A",
    ".",
    "*",
    "+",
    "?",
    "|",
    "(",
    ")",
    "[",
    "]",
    "^",
    "$",
    "{2, 3}",
    "{1,2}",
    "{,2}",
    "-",
    r"\w",
    r"\d",
    r"\D",
    r"\s",
    r"\b",
    r"\A",
    r"\Z",
    r"\z",
    r"\p{L}",
    "(?:",
    "(?i)",
    "(?i:",
    "(?s)",
    "(?x)",
    "(?m)",
    "(?<n>",
    "(?P<n>",
    "(?=",
    "(?!",
    "&&",
    "--",
    "~~",
    " ",
    "#",
    "\n",
    "_",
    "1",
    r"\x41",
    r"\101",
    "{",
    "}",
    ",",
    "é",
]


@pytest.mark.filterwarnings("ignore:Possible (nested|set):FutureWarning")
@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join), st.text("abA_1 -[]{},.&~^", min_size=1, max_size=6))
def test_any_text_is_read_as_python_reads_it_or_refused(text: str, name: str) -> None:
    """Also what is an expression by accident; and what Python refuses is refused."""
    try:
        expected = re.match(text, name) is not None
    except re.error:
        assert not is_pattern(text)
        return
    try:
        made = Pattern(text)
    except CheckpointError:
        return
    assert made.match(name) is expected


@pytest.mark.filterwarnings("ignore:Possible (nested|set):FutureWarning")
@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("[a[b]]", "b]"),
        ("a{2, 3}", "a{2, 3}"),
        ("(?x) a  b # c", "ab"),
        ("a{,2}b", "aab"),
        ("[a&&b]", "&"),
        ("a*?b", "aab"),
    ],
)
def test_what_other_engines_read_otherwise(text: str, accepted: str) -> None:
    """Sets of sets, spaces in a repeat, spaces that count for nothing: as Python has them."""
    assert re.match(text, accepted)
    assert Pattern(text).match(accepted)


@pytest.mark.parametrize("text", [r"\w+", r"a\b", "(?i)a", "a$", "(?m)^a"])
@pytest.mark.parametrize("name", ["aé", "a\nb"])
def test_names_whose_answer_hangs_on_letters_are_refused(text: str, name: str) -> None:
    """Alphabets differ between engines; without such a question any name has an answer."""
    with pytest.raises(CheckpointError) as caught:
        Pattern(text).match(name)
    assert repr(text) in str(caught.value)
    assert repr(name) in str(caught.value)
    assert Pattern("a.").match("aé")
    assert Pattern("[^b]é").match("aé")


def test_large_expressions_take_little_memory() -> None:
    """As many of the largest as a skip list of 64 KB holds: 2.9 GB for 8 KB before."""
    before = psutil.Process().memory_info().rss
    kept = [Pattern(f"{count}" + r"(?:\w\s[^a].){490}" + r"\w" * 900) for count in range(32)]
    assert psutil.Process().memory_info().rss - before < 512 * 2**20
    assert not kept[0].match("model." * 100)


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
        ("(", "unterminated"),
        ("(?!a", "unterminated"),
        ("[a", "unterminated"),
        ("*", "repeat"),
        ("a)|(b", "unbalanced"),
        ("(" * 900 + ")" * 900, "nested"),
        ("(" * (DEEPEST + 1) + ")" * (DEEPEST + 1), "nested"),
        ("a" * (LONGEST + 1), str(LONGEST)),
        (f"a{{{LARGEST}}}", "repeats"),
        ("a{99999999999999999999}", "repetition"),
        (f"a{{{'9' * 1900}}}", "repetition"),
        ("((a{1,40}){1,40}){1,40}", "repeats"),
        (r"(a)\1", "backreferences"),
        ("a(?!b)", "look"),
        ("(?<=a)b", "look"),
        ("(?!a)b|c", "look"),
        ("a*+b", "possessive"),
        ("(?>a)b", "atomic"),
        (r"\p{L}", "bad escape"),
        ("(?<n>a)", "unknown extension"),
        (r"(?i)\xe9", "ASCII"),
        ("\ud800", "half"),
    ],
)
def test_what_cannot_be_matched_is_refused(text: str, cause: str) -> None:
    """With the expression, the cause, and what is accepted."""
    with pytest.raises(CheckpointError) as caught:
        pattern(text)
    assert not is_pattern(text)
    for part in ("config.json", repr(text[:200]), cause, str(LONGEST)):
        assert part in str(caught.value)
