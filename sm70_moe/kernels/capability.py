"""What a backend can run, as data: tokens, bank layouts, dtypes, sizes. Nobody else says it.

`policy check` holds routes against it, admission chooses the banks' layout by it, and a plan sends a
call only where it says yes. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sm70_moe.decision import Finding, Plain, Reason
from sm70_moe.facts import CallFacts
from sm70_moe.layout import BankLayout, Metadata


@dataclass(frozen=True, slots=True)
class Span:
    """Token counts from `first` to `last`, both included; `last` None has no end."""

    first: int
    last: int | None = None

    def __contains__(self, tokens: object) -> bool:
        return isinstance(tokens, int) and self.first <= tokens and (self.last is None or tokens <= self.last)

    def covers(self, first: int, last: int | None) -> bool:
        """Is every count from `first` to `last` (None: no end) in it?"""
        return self.first <= first and (self.last is None or (last is not None and last <= self.last))

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} and more"
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class Reads:
    """The bank layouts that kernels read: every combination of these. `groups` None: any group."""

    orders: frozenset[str]
    metadata: frozenset[Metadata] = frozenset(Metadata)
    groups: frozenset[int] | None = None
    interleaved: frozenset[bool] = frozenset({True, False})
    batched: frozenset[bool] = frozenset({True, False})

    def takes(self, layout: BankLayout) -> bool:
        return (
            layout.order in self.orders
            and layout.metadata in self.metadata
            and layout.interleaved in self.interleaved
            and layout.batched in self.batched
            and (self.groups is None or layout.group in self.groups)
        )

    def misfits(self, layout: BankLayout) -> Iterator[Finding]:
        """Everything about a layout that is not read, one finding each."""
        if layout.order not in self.orders:
            yield _unread("bank order", sorted(self.orders), layout.order)
        if layout.metadata not in self.metadata:
            yield _unread("metadata", sorted(kind.value for kind in self.metadata), layout.metadata.value)
        if layout.interleaved not in self.interleaved:
            yield _unread("W13 columns", _columns(not layout.interleaved), _columns(layout.interleaved))
        if layout.batched not in self.batched:
            yield _unread("experts", _experts(not layout.batched), _experts(layout.batched))
        if self.groups is not None and layout.group not in self.groups:
            yield Finding.failed("bank group", Reason.PREPARED_GROUP, sorted(self.groups), layout.group)


def _unread(check: str, expected: Plain, observed: Plain) -> Finding:
    return Finding.failed(check, Reason.LAYOUT_UNREADABLE, expected, observed)


def _columns(interleaved: bool) -> str:
    return "gate and up interleaved" if interleaved else "all gates, then all ups"


def _experts(batched: bool) -> str:
    return "in one tensor" if batched else "a tensor each"


NO_LIMITS: Mapping[str, int] = MappingProxyType({})

SIZE_REASONS = MappingProxyType(
    {
        "hidden": Reason.HIDDEN,
        "intermediate": Reason.INTERMEDIATE,
        "experts": Reason.EXPERTS,
        "top_k": Reason.TOP_K,
    }
)
"""Sizes that can be limited, a rank's `intermediate` and `experts`, and what a wrong one is called."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What one backend runs on one architecture.

    `dtypes` are those of the activations; ids are INT32 and router weights FP32 everywhere, since a
    layer converts them. `contiguous` and `alignment` (bytes, of x and out) hold for the tensors of a
    call. `multiples` are the numbers that sizes must be multiples
    of, `most` their limits; the sizes are those of `SIZE_REASONS`.
    """

    tokens: Span
    reads: Reads
    dtypes: frozenset[str]
    contiguous: bool = False
    alignment: int = 1
    multiples: Mapping[str, int] = field(default_factory=lambda: NO_LIMITS)
    most: Mapping[str, int] = field(default_factory=lambda: NO_LIMITS)

    def takes(self, call: CallFacts) -> bool:
        """Will a call of these tensors run? Sizes were looked at before."""
        x, out = call.x, call.out
        if call.x.shape[0] not in self.tokens or x.dtype not in self.dtypes:
            return False
        if x.alignment < self.alignment or (out is not None and out.alignment < self.alignment):
            return False
        given = (x, call.ids, call.weights) if out is None else (x, call.ids, call.weights, out)
        return not self.contiguous or all(tensor.contiguous for tensor in given)

    def for_layer(self, dtype: str | None) -> Capability:
        """For a layer whose engine has this dtype: kernels are made for one. Unknown is FP16."""
        only = self.dtypes & {dtype or "float16"}
        return replace(self, dtypes=only) if only and only != self.dtypes else self

    def size_findings(self, sizes: Mapping[str, int | None]) -> Iterator[Finding]:
        """Sizes that do not fit, each with the number; an unknown size is the contract's matter."""
        for name, unit in self.multiples.items():
            size = sizes.get(name)
            if size is not None and size % unit:
                yield Finding.failed(f"kernels' {name}", SIZE_REASONS[name], f"a multiple of {unit}", size)
        for name, limit in self.most.items():
            size = sizes.get(name)
            if size is not None and size > limit:
                yield Finding.failed(f"kernels' {name}", SIZE_REASONS[name], f"at most {limit}", size)

    def dtype_finding(self, dtype: str | None) -> Finding | None:
        """The engine's dtype, where it is known; a call's own is a condition of the route."""
        if dtype is None:
            return None
        if dtype in self.dtypes:
            return Finding.passed("activation dtype", dtype)
        return Finding.failed("activation dtype", Reason.ACTIVATION_DTYPE, sorted(self.dtypes), dtype)

    def tokens_finding(self, first: int, last: int | None) -> Finding | None:
        """A route that promises tokens which are not run; None if it does not."""
        if self.tokens.covers(first, last):
            return None
        return Finding.failed("kernels' tokens", Reason.TOKENS, str(self.tokens), str(Span(first, last)))
