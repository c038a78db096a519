"""One layout of the banks that every admitted route reads: a layer's weights are kept once.

Where a policy has a feature that decides over a property of the banks, the feature's admission decides
it. What no feature decides is open, and becomes what the routes read, the first of them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from sm70_moe.admission.checks.layer import Layer
from sm70_moe.decision import Finding, Reason
from sm70_moe.grouping import SMALLEST_GROUP
from sm70_moe.kernels.capability import Capability
from sm70_moe.layout import ORDERS, BankLayout, Metadata
from sm70_moe.policy import Check, Feature, Policy, Route

OPEN_ORDERS = ("octet32", "tile32x8")
"""Where a policy names none: the one that kernels are specialised for, then the one that holds any size."""


@dataclass(frozen=True, slots=True)
class Banks:
    """The layouts that a layer's banks may have, the preferred one first; and the sizes that they hold.

    `hidden` and `intermediate` are those of the rank; None is not known, and then nothing is laid out.
    """

    hidden: int | None
    intermediate: int | None
    orders: tuple[str, ...]
    metadata: tuple[Metadata, ...]
    groups: tuple[int, ...]
    interleaved: tuple[bool, ...]
    batched: tuple[bool, ...]

    @classmethod
    def of(cls, policy: Policy, layer: Layer, admitted: Sequence[Feature]) -> Banks:
        """What the admitted features of a policy make of them."""
        features = policy.features.values()
        return cls(
            layer.facts.hidden,
            layer.facts.intermediate_per_rank,
            OPEN_ORDERS if policy.routes[-1].order is None else (policy.routes[-1].order,),
            metadata_kinds(features, admitted),
            groups(policy, layer, admitted),
            decided((f.interleaves_w13 for f in features), (f.interleaves_w13 for f in admitted)),
            decided((f.batches for f in features), (f.batches for f in admitted)),
        )


@dataclass(frozen=True, slots=True)
class Agreed:
    """The layout, None where there is none; and the routes (or their features) that do not read it, with why."""

    layout: BankLayout | None
    misfits: tuple[tuple[str, tuple[Finding, ...]], ...] = ()


def negotiate(banks: Banks, routes: Sequence[Route], abilities: Mapping[str, Capability | None]) -> Agreed:
    """The first layout that the last route and as many others as possible read, in the policy's order."""
    if not routes or not banks.groups:
        return Agreed(None)
    left, last = candidates(banks), routes[-1]
    if not left:
        return Agreed(None, ((last.feature or last.name, (unheld(banks),)),))
    misfits: list[tuple[str, tuple[Finding, ...]]] = []
    for route in (last, *routes[:-1]):
        ability = abilities.get(route.backend)
        reads = [layout for layout in left if ability is not None and ability.reads.takes(layout)]
        if not reads and ability is not None:
            misfits.append((route.feature or route.name, tuple(ability.reads.misfits(left[0]))))
        left = tuple(reads) or left
    return Agreed(left[0], tuple(misfits))


@lru_cache(maxsize=256)
def candidates(banks: Banks) -> tuple[BankLayout, ...]:
    """Every layout that these banks may have, of those that hold the sizes."""
    every = product(banks.orders, banks.metadata, banks.groups, banks.interleaved, banks.batched)
    return tuple(layout for parts in every if fault(layout := BankLayout(*parts), banks) is None)


def fault(layout: BankLayout, banks: Banks) -> str | None:
    """Why the sizes do not stand in such banks; orders of plug-ins are their own matter."""
    order = ORDERS.get(layout.order)
    if order is None or banks.hidden is None or banks.intermediate is None:
        return None
    for name, rows, columns in (
        ("W13", banks.hidden, 2 * banks.intermediate),
        ("W2", banks.intermediate, banks.hidden),
    ):
        found = order.fault(layout.metadata, rows, columns, layout.group)
        if found is not None:
            return f"{name}: {found}"
    return None


def unheld(banks: Banks) -> Finding:
    """No layout holds the sizes: what is wrong with the preferred one."""
    first = BankLayout(banks.orders[0], banks.metadata[0], banks.groups[0], banks.interleaved[0], banks.batched[0])
    return Finding.failed("bank order", Reason.BANK_SIZES, f"sizes that {first.order} holds", fault(first, banks))


def metadata_kinds(features: Iterable[Feature], admitted: Sequence[Feature]) -> tuple[Metadata, ...]:
    """As the admitted feature says; four bytes where one could say and is not admitted; else any, four first."""
    chosen = next((Metadata(f.metadata) for f in admitted if f.metadata), None)
    if chosen is not None:
        return (chosen,)
    return (Metadata.FOUR_BYTE,) if any(f.metadata for f in features) else tuple(Metadata)


def decided(all_features: Iterable[bool], admitted: Iterable[bool]) -> tuple[bool, ...]:
    """A property that some feature decides over is as that feature was decided, another is open."""
    if any(admitted):
        return (True,)
    return (False,) if any(all_features) else (False, True)


def groups(policy: Policy, layer: Layer, admitted: Sequence[Feature]) -> tuple[int, ...]:
    """The contract's prepared group where an admitted feature insists on it, else the widest and its divisors."""
    if layer.grouping is None:
        return ()
    wanted, widest = policy.contract.weights.prepared_group, layer.grouping.widest
    if wanted and any(Check.PREPARED_GROUP in feature.checks for feature in admitted):
        return (wanted,)
    return divisors(widest)


@lru_cache(maxsize=256)
def divisors(widest: int) -> tuple[int, ...]:
    """`widest` and the groups that divide it, the largest first; at least the smallest that is prepared."""
    return tuple(group for group in range(widest, SMALLEST_GROUP - 1, -1) if not widest % group)
