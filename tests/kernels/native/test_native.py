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
    assert (backend.name, backend.native) == ("qpn", True)
    ability = backend.can("sm_70")
    assert ability is not None
    assert ability.reads.orders == {"tile32x8", "octet32"}
    assert (ability.multiples, ability.most) == ({"hidden": 32, "intermediate": 32}, {"hidden": 16384, "top_k": 16})
    assert backend.can("cpu") is None
    assert backend.check(LayerFacts(layer="a")) == ()


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 3584), (8, 25600), (128, 409600)])
def test_scratch_is_the_intermediate(tokens: int, expected: int) -> None:
    """M x 10 x 160 FP16 numbers for the first contract, in whole blocks of 512 bytes."""
    assert NativeBackend("grouped").workspace(CONTRACT, 10, tokens) == expected


def test_run_without_a_build() -> None:
    """Running is refused by name."""
    nothing: Any = None
    with pytest.raises(BackendError, match="unknown"):
        NativeBackend("unknown").run(nothing, nothing)
