"""Takes out of texts what tells where they were written: paths, names of the machine and its user, and what
tells one device from another."""

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

UUID = re.compile(r"(?<!\w)(?:(?:GPU|MIG)-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?!\w)")
BUS = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7](?![\w.])")
"""A device's own number, and its place on the PCI bus."""

LEAST = 2
"""Letters of a name that is looked for: a single one stands in too many texts."""


def own_names() -> dict[str, str]:
    """What stands for the names of this machine and its user."""
    full = {socket.gethostname(), socket.getfqdn()}
    found = dict.fromkeys(full | {name.partition(".")[0] for name in full}, "<host>")
    with suppress(KeyError, OSError, ImportError):  # a user without a name
        found[getpass.getuser()] = "<user>"
    names = {name: sign for name, sign in found.items() if len(name) >= LEAST and not name.isdigit()}
    with suppress(RuntimeError):  # nor one without a home
        home = Path.home()
        # it may have spaces in its name, where a path would seem to end; "/", a container's, is in too many texts
        names |= {str(home): "<path>"} if len(home.parts) > 1 else {}
    return names


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
            found = re.sub(rf"(?<!\w){re.escape(name)}(?!\w){rest}", sign, found, flags=re.IGNORECASE)
    return BUS.sub("<bus>", UUID.sub("<uuid>", PATH.sub("<path>", found)))
