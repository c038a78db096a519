"""A small valid policy, and a way to see what loading says about a changed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sm70_moe.errors import PolicyError
from sm70_moe.policy import parse_policy

BASE = """\
schema = 1
name = "base"
revision = 1
summary = "A policy for tests"

[contract]
architectures = ["sm_70"]
tensor_parallel = 4
experts = 16
top_k = 2
hidden = 256
intermediate = 64
activations = "float16"
weights = { bits = 4, checkpoint_group = 128, prepared_group = 32 }

[features.banks]
kind = "layout"
doc = "Banks."

[features.fast]
kind = "route"
env = ["VLLM_SM70_FAST"]
needs = ["banks"]
doc = "Fast."

[[route]]
name = "fast"
feature = "fast"
backend = "indexed"
tokens = [2, 8]
call = { x = "float16", ids = "int32", weights = "float32", contiguous = true, alignment = 16 }

[[route]]
name = "legacy"
backend = "legacy"

[[evidence]]
route = "fast"
claim = "It is right."
source = "A test."
limits = "None."
"""


@pytest.fixture
def base() -> str:
    """Text of the small policy."""
    return BASE


@pytest.fixture
def problems() -> Callable[..., list[tuple[str, int, str]]]:
    """(key path, line, whole text) of every problem of the small policy after replacing pieces of it."""

    def find(*edits: tuple[str, str], backends: tuple[str, ...] | None = None) -> list[tuple[str, int, str]]:
        text = BASE
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        try:
            parse_policy(text, "FILE", backends=backends)
        except PolicyError as error:
            return [split(problem) for problem in error.problems]
        return []

    return find


def split(problem: str) -> tuple[str, int, str]:
    _, line, path, _ = problem.split(":", 3)
    return path.strip(), int(line), problem
