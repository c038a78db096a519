"""Takes out of texts what tells where they were written: paths, and names of the machine and its user."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sm70_moe.decision import Plain

REST = r"""[^\s'",;:()<>|]"""
"""What goes on after the beginning of a path."""

PATH = re.compile(rf"(?<![\w.<>~/\\])(?:~|[A-Za-z]:(?=[/\\]))?[/\\]{REST}+")
"""An absolute path, or one below a home folder; "group-32/batched" and "GB/s" are none."""

LEAST = 2
"""Letters of a name that is looked for: a single one stands in too many texts."""


def own_names() -> dict[str, str]:
    """What stands for the names of this machine and its user."""
    found = {socket.gethostname(): "<host>", socket.getfqdn(): "<host>"}
    with suppress(KeyError, OSError, ImportError):  # a user without a name
        found[getpass.getuser()] = "<user>"
    # a home folder may have spaces in its name, where a path would seem to end
    return {str(Path.home()): "<path>"} | {name: sign for name, sign in found.items() if len(name) >= LEAST}


def anonymous(value: Plain, names: Mapping[str, str] | None = None) -> Plain:
    """The same value without paths and these names (default: the own ones) in any text.

    Names are looked for in texts of several words: a single word is one of this package's own.
    """
    known = own_names() if names is None else names
    if isinstance(value, str):
        return text_without(value, known)
    if isinstance(value, Mapping):
        return {key: anonymous(item, known) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [anonymous(item, known) for item in value]
    return value


def text_without(text: str, names: Mapping[str, str]) -> str:
    found = text
    if " " in text:
        for name, sign in sorted(names.items(), key=lambda pair: -len(pair[0])):
            rest = f"{REST}*" if sign == "<path>" else ""
            found = re.sub(rf"(?<!\w){re.escape(name)}(?!\w){rest}", sign, found)
    return PATH.sub("<path>", found)
