"""A policy's contract and calls against what the built-in backends are declared to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm70_moe.errors import PolicyError
from sm70_moe.policy import load_policy, parse_policy

NAME = "qwen3.8-flash-next-awq-tp4"


@pytest.mark.parametrize(
    ("old", "new", "path", "accepted"),
    [
        ("prepared_group = 32", "prepared_group = 16", "contract.weights.prepared_group", "32, 64, 128"),
        ("hidden          = 2560", "hidden          = 2564", "contract.hidden", "a multiple of"),
        ('order   = "octet32"', 'order   = "tile8"', "order", '"octet32" or "tile32x8"'),
        ('x = "float16"', 'x = "bfloat16"', "call.x", '"float16"'),
        ('ids = "int32"', 'ids = "int64"', "call.ids", '"int32"'),
        ('weights = "float32"', 'weights = "float16"', "call.weights", '"float32"'),
    ],
)
def test_what_no_native_backend_runs_is_a_fault_of_the_policy(old: str, new: str, path: str, accepted: str) -> None:
    """Told at its key with the value and what the backend takes."""
    text = Path(load_policy(NAME).origin).read_text()
    assert old in text
    with pytest.raises(PolicyError) as caught:
        parse_policy(text.replace(old, new), "EDITED")
    value = new.rpartition("= ")[2]
    told = [p for p in caught.value.problems if p.split(": ")[1].endswith(path) and f"found {value}" in p]
    assert any(f"accepted {accepted}" in p and "which backend" in p for p in told), caught.value.problems
