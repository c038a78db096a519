"""Numbers of tokens, as every command takes them."""

from __future__ import annotations

import re

from sm70_moe.errors import SettingsError

LARGEST_CALL = 8192
"""Tokens; what the longest warm-up of an engine sends at once."""


def token_counts(text: str, most: int = LARGEST_CALL) -> tuple[int, ...]:
    """ "1,2,8" as numbers from 1 to `most`; SettingsError on anything else."""
    items = text.split(",")
    if not all(re.fullmatch("[0-9]{1,4}", item) and 1 <= int(item) <= most for item in items):
        raise SettingsError(f"--tokens {text!r}: accepted are numbers from 1 to {most}, separated by commas")
    return tuple(map(int, items))
