"""Layers with banks, for the tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from sm70_moe.banks.banks import Bank, Banks
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata

MakeBanks = Callable[..., Banks]


@pytest.fixture
def banks_of() -> MakeBanks:
    """Makes the banks of a layer."""

    def make(layer: SyntheticLayer, **choice: Any) -> Banks:
        usual = {"metadata": Metadata.FOUR_BYTE, "group": layer.group, "interleaved": False, "batched": True}
        shape = BankShape(layer.experts, layer.hidden, layer.intermediate // layer.ranks)
        return LegacyBackend().prepare(layer, BankLayout("tile32x8", **{**usual, **choice}), shape, "cpu")

    return make


@dataclass
class CountingBank:
    """A bank that notes which experts are decoded."""

    bank: Bank
    decoded: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bank, name)

    def dequantise(self, expert: int) -> torch.Tensor:
        self.decoded.append(expert)
        return self.bank.dequantise(expert)


@pytest.fixture
def counting() -> Callable[[Banks], Any]:
    """Wraps banks so that `.w13.decoded` and `.w2.decoded` list the decoded experts."""

    def wrap(banks: Banks) -> Any:
        counted: Any = {"w13": CountingBank(banks.w13), "w2": CountingBank(banks.w2)}
        return replace(banks, **counted)

    return wrap
