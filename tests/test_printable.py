"""Text that was given is one line of signs that are seen."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.printable import printable

SEEN = {"L", "M", "N", "P", "S"}


@given(st.text(st.characters(exclude_categories=())))
def test_only_signs_that_are_seen(text: str) -> None:
    """Whatever it was: no control, no format, no line end, no half of a surrogate; what is escaped can be read back."""
    shown = printable(text)
    assert all(sign == " " or unicodedata.category(sign)[0] in SEEN for sign in shown)
    assert len(shown.splitlines()) <= 1
    shown.encode()
    assert printable(shown) == shown


def test_each_kind() -> None:
    """Written out: what moves a cursor, forges a line, turns the order round, or is not seen; letters stay."""
    assert printable("a\nb\r\t\x1b[31m\x9b1m\x7f\x00") == r"a\nb\r\t\x1b[31m\x9b1m\x7f\x00"
    assert printable("\u202e\u2066\u200f\u061c\u200b\u200d\ufeff\u2028\u2029\u0085") == (
        r"\u202e\u2066\u200f\u061c\u200b\u200d\ufeff\u2028\u2029\x85"
    )
    assert printable("\u3164\u2800\ufe0f\U000e0041\u00ad\u00a0\udcff") == r"\u3164\u2800\ufe0f\U000e0041\xad\xa0\udcff"
    assert printable("größe 专家 [red] \\n é́") == "größe 专家 [red] \\n é́"
