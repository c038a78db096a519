"""The same tokens with and without us in an engine with paged prompts and graphs, and no call on the portable route."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def toy(monkeypatch_module: pytest.MonkeyPatch) -> ModuleType:
    """bench/engine.py."""
    path = Path(__file__).parents[2] / "bench" / "engine.py"
    spec = importlib.util.spec_from_file_location("toy_engine", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch_module.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def same_tokens(found: dict[str, Any], steps: int) -> None:
    """No difference but ties, and ours is no farther from the host's experts than their own FP32 form is."""
    ours, exact = found["ours"], found["exact"]
    assert ours["differences"] == []
    assert ours["equal"] + ours["ties"] == steps
    assert ours["ties"] <= 2 * exact["ties"] + steps // 50 + 1
    for mine, theirs in zip(ours["apart"][:2], exact["apart"][:2], strict=True):  # median, nine tenths
        assert mine <= 2 * theirs


def test_the_toy_itself(toy: ModuleType) -> None:
    """On the CPU, where every call is portable: the two engines agree, so what they are compared by is sound."""
    model = toy.Model(
        hidden=128, intermediate=64, experts=8, top_k=2, layers=2, heads=4, vocabulary=512, group=32, page=16
    )
    found = toy.compare(model, "cpu", sequences=3, prompt=40, chunk=32, steps=2)
    same_tokens(found, 3 + 2 * (1 + 3))
    assert set(found["routes"]) == {"legacy"}
    assert found["portable"] == sum(found["routes"].values())


def test_wrong_experts_are_seen(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: experts of another layer give logits that are far apart."""
    model = toy.Model(
        hidden=128, intermediate=64, experts=8, top_k=2, layers=1, heads=4, vocabulary=512, group=32, page=16
    )
    whole = toy.Dequantised.__init__
    monkeypatch.setattr(toy.Dequantised, "__init__", lambda self, model, index, *rest: whole(self, model, 9, *rest))
    found = toy.compare(model, "cpu", sequences=1, prompt=20, chunk=32, steps=1)
    with pytest.raises(AssertionError):
        same_tokens(found, 1 + 1)


@pytest.mark.gpu
def test_prompts_of_4096_tokens_and_decode_through_graphs(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve sequences: prompts in chunks of 2,048, then 32 steps of one, of eight and of twelve."""
    found = toy.compare(toy.MODEL, "cuda:0", sequences=12, prompt=4096, chunk=2048, steps=32)
    with capsys.disabled():
        print("\ntoy engine:", json.dumps(found))
    same_tokens(found, 12 + 32 * (1 + 8 + 12))
    assert found["portable"] == 0
    assert {"native_decode", "grouped_batch", "native_prefill"} <= set(found["routes"])
