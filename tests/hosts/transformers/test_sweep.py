"""A few families of the sweep, on the transformers that is here: what stands in the page's table comes out."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SWEEP = Path(__file__).with_name("sweep.py")
FAMILIES = ("qwen3_moe", "mixtral", "muse_spark", "longcat_flash", "llama4")


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweep", SWEEP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_out_as_the_table_says(family: str, sweep: ModuleType) -> None:
    """Admitted and equal in FP32, or refused for the same reason, with a plain layer off by far more than rounding."""
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"this transformers has no {family}")
    expected = next(one for one in json.loads(sweep.DATA.read_text()) if one["family"] == family)
    (found,) = sweep.sweep({family})
    assert (found.admitted, found.reason, found.arithmetic) == (
        expected["admitted"], expected["reason"], expected["arithmetic"]
    )  # fmt: skip
    if found.admitted:
        assert found.difference is not None
        assert found.difference <= sweep.EQUAL
    elif found.difference is not None:
        assert found.difference > 1000 * sweep.EQUAL
