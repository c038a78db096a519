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
from sm70_moe.evidence.trial import Inputs, Trial, same_bits
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.protocol import Backend
from sm70_moe.layout import BankLayout, BankShape, Metadata

MEMBERS = ("name", "native", "options", "can", "check", "workspace", "prepare", "run")
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, GROUP = 256, 64, 8, 4, 32


def layouts(ability: Capability) -> Iterator[BankLayout]:
    """Every bank that a plan may hand to a backend, of those with groups of 32 and all experts in one tensor."""
    for order in sorted(ability.reads.orders):
        for metadata in Metadata:
            for interleaved in (True, False):
                layout = BankLayout(order, metadata, GROUP, interleaved, batched=True)
                if ability.reads.takes(layout):
                    yield layout


def check_backend(backend: Backend, *, device: str = "cpu", tokens: tuple[int, ...] = (1, 2, 8, 9)) -> list[str]:
    """Run a backend on a small random layer and name every clause that it breaks; empty if none.

    Needs a backend that takes FP16 activations and any geometry, or this one: hidden 256, 64
    intermediate, 8 experts, top-4, groups of 32. Of `tokens` those are tried that it can run.
    """
    broken = [f"the protocol has {name}, this backend has not" for name in MEMBERS if not hasattr(backend, name)]
    if broken:
        return broken
    ability = backend.can(None)
    readable = [] if ability is None else list(layouts(ability))
    if ability is None or not readable:
        return ["can: it reads no banks, so no route can use it"]
    source = SyntheticLayer(EXPERTS, HIDDEN, INTERMEDIATE, GROUP)
    for layout in readable:
        banks = backend.prepare(source, layout, BankShape(EXPERTS, HIDDEN, INTERMEDIATE), device)
        for count in (count for count in tokens if count in ability.tokens):
            case = Case(backend, banks, source, count, device)
            broken += [f"{layout.tag}, {count} tokens: {clause}" for clause in case.broken()]
    return broken


class Case:
    """One backend on one bank with one number of tokens."""

    def __init__(self, backend: Backend, banks: Banks, source: SyntheticLayer, tokens: int, device: str) -> None:
        self.run = partial(backend.run, banks)
        self.call = Inputs.random(tokens, TOP_K, hidden=HIDDEN, experts=EXPERTS, seed=tokens, device=device)
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

    def output(self, call: Inputs) -> torch.Tensor:
        out = torch.full_like(call.x, torch.nan)
        self.run(Call(call.x, call.ids, call.weights, out))
        return out

    def duplicates(self) -> bool:
        same = self.call.ids[:, :1].expand_as(self.call.ids).contiguous()
        return self.trial.judge(Inputs(self.call.x, same, self.call.weights)).ok

    def invalid_ids(self) -> bool:
        """Ids just outside, far outside and negative, their weights not numbers: as if the slot were not there."""
        plain, odd = self.call.ids.clone(), self.call.ids.clone()
        weights, poisoned = self.call.weights.clone(), self.call.weights.clone()
        plain[:, 0], weights[:, 0], poisoned[:, 0] = -1, 0.0, torch.nan
        wanted = self.output(Inputs(self.call.x, plain, weights))
        for value in (-1, EXPERTS, 2**31 - 1, -(2**31)):
            odd[:, 0] = value
            if not same_bits(self.output(Inputs(self.call.x, odd, poisoned)), wanted):
                return False
        return True

    def all_invalid(self) -> bool:
        nothing = torch.full_like(self.call.ids, -1)
        return bool((self.output(Inputs(self.call.x, nothing, self.call.weights)) == 0).all())

    def one_bad_row(self) -> bool:
        x = self.call.x.clone()
        x[0] = torch.inf
        bad = self.output(Inputs(x, self.call.ids, self.call.weights))
        return same_bits(bad[1:], self.output(self.call)[1:])

    def overlap(self) -> bool:
        try:
            self.run(Call(self.call.x, self.call.ids, self.call.weights, self.call.x))
        except BackendError:
            return True
        return False
