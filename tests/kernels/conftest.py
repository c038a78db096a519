"""Layers with banks, for the tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.layout import BankLayout, BankShape, Metadata


@dataclass
class PlainBank:
    """A bank that decodes with the reference's own decoder and counts what it decodes."""

    layer: SyntheticLayer
    names: tuple[str, ...]
    interleaved: bool
    decoded: list[int]

    def dequantise(self, expert: int) -> torch.Tensor:
        self.decoded.append(expert)
        words, every, own = self.layer.words(expert), slice(None), self.layer.columns
        if self.names == ("down",):
            return torch.from_numpy(words.down.weights(own, every)).half().T.contiguous()
        gate, up = (torch.from_numpy(m.weights(every, own)).half().T for m in (words.gate, words.up))
        return torch.stack((gate, up), 1).flatten(0, 1) if self.interleaved else torch.cat((gate, up))


@dataclass
class PlainBanks:
    shape: BankShape
    layout: BankLayout
    w13: PlainBank
    w2: PlainBank


@pytest.fixture
def banks_of() -> Callable[..., Any]:
    """Makes banks of a layer without the package's bank code."""

    def make(layer: SyntheticLayer, interleaved: bool = False) -> PlainBanks:
        decoded: list[int] = []
        return PlainBanks(
            BankShape(layer.experts, layer.hidden, layer.intermediate // layer.ranks),
            BankLayout("tile32x8", Metadata.FOUR_BYTE, layer.group, interleaved, True),
            PlainBank(layer, ("gate", "up"), interleaved, decoded),
            PlainBank(layer, ("down",), interleaved, decoded),
        )

    return make
