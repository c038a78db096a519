"""The conformance kit passes what is right and names what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sm70_moe.kernels.call import Call
from sm70_moe.kernels.capability import Reads
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.testing import fake_backends
from sm70_moe.testing.conformance import check_backend


def test_legacy_conforms() -> None:
    """The backend that is always there keeps every clause, on every layout."""
    assert check_backend(LegacyBackend()) == []


def test_fakes_conform() -> None:
    """The fakes of the native backends are good enough to stand in for them."""
    assert check_backend(fake_backends()["qpn"], tokens=(1,)) == []


@dataclass(frozen=True)
class Wrong(LegacyBackend):
    """`legacy` with one planted fault."""

    fault: str = ""

    def run(self, banks, call, space=None) -> None:
        ids, weights, out = call.ids, call.weights, call.out
        if self.fault == "last expert" and (ids < 0).any():
            ids = torch.where(ids < 0, banks.shape.experts - 1, ids)
            weights = weights.nan_to_num(1.0)
        if self.fault == "overlap" and out is call.x:
            return
        super().run(banks, Call(call.x, ids, weights, out, call.intermediate))
        if self.fault == "spreads" and not bool(torch.isfinite(out).all()):
            out.fill_(torch.nan)
        if self.fault == "scale":
            out.mul_(1.002)


def clauses(fault: str, tokens: int = 2) -> set[str]:
    return {line.split(": ", 1)[1] for line in check_backend(Wrong(fault=fault), tokens=(tokens,))}


def test_planted_faults_are_named() -> None:
    """Each fault breaks its own clause."""
    assert "invalid ids contribute nothing" in clauses("last expert")
    assert "all ids invalid gives exactly zero" in clauses("last expert")
    assert clauses("overlap") == {"an output over an input is refused"}
    assert clauses("spreads") == {"an infinite row stays one row"}
    assert "bounds, finite values and equal bits on repeat" in clauses("scale")


def test_a_backend_that_raises_breaks_the_clause_only() -> None:
    """Another exception than BackendError is named with the clause, and the other clauses are still asked."""

    class Raises(LegacyBackend):
        def run(self, banks, call, space=None) -> None:
            if call.out is call.x:
                raise ValueError("same tensor")
            super().run(banks, call)

    lines = check_backend(Raises(), tokens=(1,))
    assert {line.split(": ", 1)[1] for line in lines} == {
        "an output over an input is refused: it raised ValueError: same tensor"
    }


def test_a_backend_without_banks_or_members_is_named() -> None:
    """A kit that checked nothing would pass everything."""

    class Unreadable(LegacyBackend):
        def can(self, architecture):
            return replace(super().can(architecture), reads=Reads(orders=frozenset()))

    assert check_backend(Unreadable()) == ["can: it reads no banks, so no route can use it"]
    assert check_backend(object())[0] == "the protocol has name, this backend has not"
