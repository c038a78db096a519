"""What every route needs of a layer: a readable format, 4 bits, an arithmetic that we do, whole shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from sm70_moe.decision import Finding, Plain, Reason, Status
from sm70_moe.facts import PLAIN, Alike, LayerFacts
from sm70_moe.grouping import CHECK as SHARD
from sm70_moe.grouping import Grouping, group_layer
from sm70_moe.layout import BankShape
from sm70_moe.numbers.formats import ACT_ORDER, BITS, READABLE

__all__ = ["BITS", "READABLE", "Layer", "equal", "look_at", "positive", "weight_format"]

HINTS = {ACT_ORDER: "rows are permuted among the groups; a file quantised without desc_act can be read"}
"""By the last remark of a packing."""

ACTIVATION = "silu"
UNQUANTISED = "none"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's facts with what several checks derive from them."""

    facts: LayerFacts
    alike: Alike
    grouping: Grouping | None
    base: tuple[Finding, ...]
    sizes: Mapping[str, int | None]
    """Hidden size, one rank's intermediate size, experts and top-k; None is not known."""
    shape: BankShape | None
    """Banks with these sizes, all experts on one rank; None where a size is not known."""

    @property
    def readable(self) -> bool:
        """Is the format one that banks can be prepared from?"""
        return self.base[0].status is Status.PASS

    @property
    def foreign(self) -> bool:
        """Is it not quantised? Then it is the engine's own, whatever the operator wants of quantised ones."""
        return self.facts.format == UNQUANTISED

    @property
    def uneven(self) -> bool:
        """Do the ranks not divide the layer, so that there is no size per rank?"""
        return any(f.reason is Reason.SHARD_UNEVEN for f in self.base)


def look_at(facts: LayerFacts, assumption: str | None = None) -> Layer:
    """Run the checks that every route of this layer shares. `assumption`: what is taken for what is not known."""
    facts = assumed(facts, assumption)
    alike = facts.alike
    return Layer(facts, alike, *seen(alike))


@lru_cache(maxsize=256)  # the layers of a model are alike
def seen(
    alike: Alike,
) -> tuple[Grouping | None, tuple[Finding, ...], Mapping[str, int | None], BankShape | None]:
    """What `look_at` finds: grouping, findings, sizes and shape."""
    facts = LayerFacts.of(alike)
    readable = weight_format(facts)
    grouping = group_layer(facts) if readable.status is Status.PASS else Finding.skipped(SHARD, "format")
    base = (
        readable,
        equal("bits", Reason.BITS, BITS, facts.bits)
        if readable.status is Status.PASS
        else Finding.skipped("bits", "format"),
        grouping.finding if isinstance(grouping, Grouping) else grouping,
        with_doubt(equal("activation", Reason.ACTIVATION, ACTIVATION, facts.activation), facts.doubt),
        equal("gated", Reason.ACTIVATION, True, facts.gated),
        equal("bias", Reason.ACTIVATION, False, facts.bias),
        equal("router weight on input", Reason.ACTIVATION, False, facts.router_weight_on_input),
        with_doubt(equal("arithmetic", Reason.ACTIVATION, PLAIN, facts.arithmetic), facts.doubt),
        rank("tensor rank", facts.tensor_rank, facts.tensor_parallel),
        positive("expert parallel", Reason.EXPERT_PARALLEL, facts.expert_parallel),
        rank("expert rank", facts.expert_rank, facts.expert_parallel),
        positive("experts", Reason.EXPERTS, facts.experts),
        positive("top-k", Reason.TOP_K, facts.top_k),
    )
    hidden, intermediate, experts = facts.hidden, facts.intermediate_per_rank, facts.experts
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": facts.top_k}
    shape = None
    if hidden is not None and intermediate is not None and experts is not None:
        shape = BankShape(experts, hidden, intermediate)
    return grouping if isinstance(grouping, Grouping) else None, base, MappingProxyType(sizes), shape


def assumed(facts: LayerFacts, assumption: str | None) -> LayerFacts:
    """The facts with what the operator knows of the arithmetic in the place of what is not known; nothing that is."""
    if assumption is None:
        return facts
    return replace(
        facts,
        activation=ACTIVATION if facts.activation is None else facts.activation,
        router_weight_on_input=bool(facts.router_weight_on_input),
        arithmetic=facts.arithmetic or PLAIN,
    )


def with_doubt(finding: Finding, doubt: str) -> Finding:
    """The finding, and why a fact is not known."""
    return replace(finding, hint=doubt) if doubt and finding.status is Status.UNKNOWN else finding


def weight_format(facts: LayerFacts) -> Finding:
    """Can banks be prepared from this format at all?"""
    accepted = ", ".join(f"{name} ({' or '.join(packings)})" for name, packings in READABLE.items())
    if facts.format is None:
        return Finding.unknown("format", accepted)
    packings = READABLE.get(facts.format)
    if packings is None:
        observed = facts.format if facts.packing is None else f"{facts.format} ({facts.packing})"
        return Finding.failed("format", Reason.FORMAT, accepted, observed)
    if facts.packing is None:
        return Finding.unknown("format", accepted, hint="the packing is not known")
    if facts.packing not in packings:
        hint = HINTS.get(facts.packing.rpartition(", ")[2], "")
        return Finding.failed("format", Reason.FORMAT, accepted, f"{facts.format} ({facts.packing})", hint)
    return Finding.passed("format", f"{facts.format} ({facts.packing})")


def equal(check: str, reason: Reason, expected: Plain, observed: Plain) -> Finding:
    """One fact against the one value that is accepted."""
    if observed is None:
        return Finding.unknown(check, expected)
    if observed == expected and type(observed) is type(expected):
        return Finding.passed(check, observed)
    return Finding.failed(check, reason, expected, observed)


def positive(check: str, reason: Reason, observed: int | None) -> Finding:
    """A count that must be there."""
    if observed is None:
        return Finding.unknown(check, "at least 1")
    if observed < 1:
        return Finding.failed(check, reason, "at least 1", observed)
    return Finding.passed(check, observed)


def rank(check: str, observed: int | None, size: int | None) -> Finding:
    """A rank of a group of known size; alone, a rank need not say which one it is."""
    if size is not None and size > 1 and observed is None:
        return Finding.unknown(check, f"0 to {size - 1}")
    if observed is not None and (observed < 0 or (size is not None and observed >= max(size, 1))):
        return Finding.failed(check, Reason.RANK, f"0 to {max(size or 1, 1) - 1}", observed)
    return Finding.passed(check, observed)
