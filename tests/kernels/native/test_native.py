from __future__ import annotations

from typing import Any

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.layout import BankShape

CONTRACT = BankShape(experts=512, hidden=2560, intermediate=160)


def test_declared() -> None:
    """A native backend can be asked everything that admission needs."""
    backend = NativeBackend("qpn")
    assert (backend.name, backend.native, backend.orders) == ("qpn", True, {"tile32x8", "octet32"})
    assert backend.check(LayerFacts(layer="a")) == ()


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 3200), (8, 25600), (128, 409600)])
def test_scratch_is_the_intermediate(tokens: int, expected: int) -> None:
    """M x 10 x 160 FP16 numbers for the first contract."""
    assert NativeBackend("grouped").workspace(CONTRACT, 10, tokens) == expected


def test_run_without_a_build() -> None:
    """Running is refused by name."""
    nothing: Any = None
    with pytest.raises(BackendError, match="indexed"):
        NativeBackend("indexed").run(nothing, nothing, nothing, nothing, nothing)
