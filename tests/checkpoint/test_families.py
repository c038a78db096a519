"""The sweep over transformers' families, the package's table of model types and the page say the same."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sm70_moe.checkpoint.model_types import read_model_types

TESTS = Path(__file__).parents[1]
RUN = "transformers 5.24.0, its modules run"


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    """The script, which imports transformers only when it runs."""
    spec = importlib.util.spec_from_file_location("sweep", TESTS / "hosts" / "transformers" / "sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((TESTS / "data" / "families.json").read_text())
    return found


def test_the_page_has_the_sweeps_table(sweep: ModuleType, records: list[dict[str, Any]]) -> None:
    """As the script writes it."""
    text = sweep.PAGE.read_text()
    assert sweep.page(text, records) == text


def test_admitted_families_are_plain_in_the_table(records: list[dict[str, Any]]) -> None:
    """And were equal to their modules, which the script has seen to before it wrote them."""
    families = read_model_types().families
    admitted = [one for one in records if one["admitted"]]
    assert len(admitted) > 50
    for one in admitted:
        row = families[one["model_type"]]
        assert (row.differs, row.router_weight, one["reason"]) == ("", "output", ""), one["family"]


def test_refused_families_say_why(records: list[dict[str, Any]]) -> None:
    """What the table says of them stands in the sweep's reason."""
    families = read_model_types().families
    for one in (one for one in records if not one["admitted"]):
        row = families.get(one["model_type"])
        assert one["reason"], one["family"]
        if row is not None:
            assert row.differs in one["reason"], one["family"]


def test_rows_that_say_they_were_run_were(records: list[dict[str, Any]]) -> None:
    """Each such type is a family of the sweep, or the outer or inner config of one."""
    swept = {one["family"] for one in records} | {one["model_type"] for one in records}
    run = [name for name, row in read_model_types().families.items() if row.source.startswith(RUN)]
    assert len(run) > 60
    lost = [name for name in run if not any(name == one or name.startswith(f"{one}_") for one in swept)]
    assert lost == []
