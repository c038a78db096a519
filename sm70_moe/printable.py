"""Text that somebody has given, as one line that a terminal shows as it is.

Names of tensors, texts of config.json, summaries of policies, names of variables: whoever wrote them may have wanted to
move the cursor, forge a line, or turn the order of letters round. Everything that is printed goes through here.
"""

from __future__ import annotations

import re

HIDDEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks that Python calls printable and nobody sees: fillers, joiners, selectors of variants."""


def printable(text: str) -> str:
    """The text with escapes (`\\n`, `\\x1b`, `\\u202e`, `\\udcff`) for what is no sign that is seen.

    These are control and format characters (bidirectional ones and those of no width among them), line
    ends, every space but the usual one, halves of surrogates and what has no meaning yet.
    """
    if text.isprintable() and HIDDEN.search(text) is None:
        return text
    return "".join(sign if is_seen(sign) else sign.encode("unicode_escape").decode() for sign in text)


def is_seen(sign: str) -> bool:
    return sign.isprintable() and HIDDEN.match(sign) is None
