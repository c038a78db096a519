"""The conformance kit: what every backend must do, whatever its kernels look like.

A plug-in's test is one line: `assert check_backend(MyBackend()) == []`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.errors import BackendError
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Call, Trial, same_bits
from sm70_moe.kernels.protocol import Backend
from sm70_moe.layout import BankLayout, BankShape, Metadata

MEMBERS = ("name", "native", "orders", "options", "check", "scratch", "prepare", "run")
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, GROUP = 256, 64, 8, 4, 32


def layouts(order: str) -> Iterator[BankLayout]:
    """Every bank that a plan may hand to a backend of this weight order."""
    for metadata in Metadata:
        for interleaved in (True, False):
            yield BankLayout(order, metadata, GROUP, interleaved, batched=True)


def check_backend(backend: Backend, *, device: str = "cpu", tokens: tuple[int, ...] = (1, 2, 8, 9)) -> list[str]:
    """Run a backend on a small random layer and name every clause that it breaks; empty if none.

    Needs a backend that takes FP16 activations and any geometry, or this one: hidden 256, 64
    intermediate, 8 experts, top-4, groups of 32.
    """
    broken = [f"the protocol has {name}, this backend has not" for name in MEMBERS if not hasattr(backend, name)]
    broken += [] if broken or backend.orders else ["orders: it reads no banks, so no route can use it"]
    if broken:
        return broken
    source = SyntheticLayer(EXPERTS, HIDDEN, INTERMEDIATE, GROUP)
    for order in sorted(backend.orders):
        for layout in layouts(order):
            banks = backend.prepare(source, layout, BankShape(EXPERTS, HIDDEN, INTERMEDIATE), device)
            for count in tokens:
                case = Case(backend, banks, source, count, device)
                broken += [f"{layout.tag}, {count} tokens: {clause}" for clause in case.broken()]
    return broken


class Case:
    """One backend on one bank with one number of tokens."""

    def __init__(self, backend: Backend, banks: Banks, source: SyntheticLayer, tokens: int, device: str) -> None:
        self.run = partial(backend.run, banks)
        self.call = Call.random(tokens, TOP_K, hidden=HIDDEN, experts=EXPERTS, seed=tokens, device=device)
        self.trial = Trial(backend.name, backend.name, self.run, source.reference, INTERMEDIATE)

    def broken(self) -> Iterator[str]:
        """The clauses of CONTRACT 5, 8 and 9 that do not hold."""
        clauses: dict[str, Callable[[], bool]] = {
            "bounds, finite values and equal bits on repeat": lambda: self.trial.judge(self.call).ok,
            "duplicate ids stay separate slots": self.duplicates,
            "invalid ids contribute nothing": self.invalid_ids,
            "all ids invalid gives exactly zero": self.all_invalid,
            "an infinite row stays one row": self.one_bad_row,
            "an output over an input is refused": self.overlap,
        }
        for name, holds in clauses.items():
            try:
                if not holds():
                    yield name
            except Exception as error:  # a backend that raises breaks the clause; the others are still asked
                yield f"{name}: it raised {type(error).__name__}: {error}"

    def output(self, call: Call) -> torch.Tensor:
        out = torch.full_like(call.x, torch.nan)
        self.run(call.x, call.ids, call.weights, out)
        return out

    def duplicates(self) -> bool:
        same = self.call.ids[:, :1].expand_as(self.call.ids).contiguous()
        return self.trial.judge(Call(self.call.x, same, self.call.weights)).ok

    def invalid_ids(self) -> bool:
        """Ids just outside, far outside and negative, their weights not numbers: as if the slot were not there."""
        plain, odd = self.call.ids.clone(), self.call.ids.clone()
        weights, poisoned = self.call.weights.clone(), self.call.weights.clone()
        plain[:, 0], weights[:, 0], poisoned[:, 0] = -1, 0.0, torch.nan
        wanted = self.output(Call(self.call.x, plain, weights))
        for value in (-1, EXPERTS, 2**31 - 1, -(2**31)):
            odd[:, 0] = value
            if not same_bits(self.output(Call(self.call.x, odd, poisoned)), wanted):
                return False
        return True

    def all_invalid(self) -> bool:
        nothing = torch.full_like(self.call.ids, -1)
        return bool((self.output(Call(self.call.x, nothing, self.call.weights)) == 0).all())

    def one_bad_row(self) -> bool:
        x = self.call.x.clone()
        x[0] = torch.inf
        bad = self.output(Call(x, self.call.ids, self.call.weights))
        return same_bits(bad[1:], self.output(self.call)[1:])

    def overlap(self) -> bool:
        try:
            self.run(self.call.x, self.call.ids, self.call.weights, self.call.x)
        except BackendError:
            return True
        return False
