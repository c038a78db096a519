"""The states that the native routes' flags are in, cell by cell, set in this process's real environment."""

from __future__ import annotations

import pytest

VALUES = {"unset": None, "off": "0", "require": "1"}

VARIABLES = (
    # the first contract's own names
    "VLLM_SM70_AWQ_QWEN38_QPN_M1",
    "VLLM_SM70_AWQ_QWEN38_MOE_COMPACT_GROUPED_DECODE",
    "VLLM_SM70_AWQ_QWEN38_MOE_INDEXED_PREFILL",
    # those that the flags of any other policy have as well
    "SM70_MOE_QPN_M1",
    "SM70_MOE_GROUPED_DECODE",
    "SM70_MOE_INDEXED_PREFILL",
)


@pytest.fixture(params=VALUES)
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The state's name; the variables have its value, as a user's shell would have set it."""
    value = VALUES[request.param]
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    if request.param == "off":  # it steps back for a 0 of the others, and is looked up all the same
        monkeypatch.setenv("SM70_MOE_NATIVE_DECODE", "0")
    return request.param
