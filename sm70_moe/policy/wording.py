"""Wording: how values and accepted names read in a problem."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def shown(value: Any) -> str:
    """A value as a policy file writes it, in short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(item) for item in value)}]" if len(value) < 9 else f"an array of {len(value)}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | int) else str(value)


def one_of(name: str, names: Iterable[str]) -> str:
    """The accepted names as text, with the one that was probably meant in front."""
    known = sorted(names)
    near = get_close_matches(name, known, 1)
    listed = ", ".join(known) or "none"
    return f"{shown(near[0])} (nearest of {listed})" if near else listed
