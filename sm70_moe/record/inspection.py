"""What a checkpoint holds, and what cutting it over ranks would mean: from headers and config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sm70_moe.admission.checks.layer import look_at
from sm70_moe.checkpoint.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.decision import Finding, Plain, Status
from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import Grouping
from sm70_moe.layout import BankShape, Metadata
from sm70_moe.plan.layergroup import around_index
from sm70_moe.reading.shard import split
from sm70_moe.settings.layerlists import LayerList, merge

SIZES = (1, 2, 4, 8)
"""Tensor-parallel and expert-parallel sizes that are looked at."""


class Kind(StrEnum):
    """What can be done with a layer's experts."""

    QUANTISED = "quantised"  # banks can be prepared
    UNQUANTISED = "unquantised"  # the engine's own business
    UNREADABLE = "not readable"  # another format, other bits, another arithmetic
    DAMAGED = "damaged"  # tensors are missing or contradict each other


class Verdict(StrEnum):
    """What a cut does to a layer's groups."""

    NATIVE = "native"
    REGROUPED = "re-grouped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to spread alike layers over ranks.

    `group` counts rows in the banks; `experts` and `intermediate` are those of the fullest rank;
    `nbytes` are all the layers' banks on that rank, by metadata layout. A refused cut has a finding.
    """

    verdict: Verdict
    group: int | None = None
    experts: int = 0
    intermediate: int = 0
    nbytes: Mapping[Metadata, int] = field(default_factory=dict)
    finding: Finding | None = None

    def record(self) -> dict[str, Plain]:
        return {
            "verdict": self.verdict.value,
            "group": self.group,
            "experts": self.experts,
            "intermediate": self.intermediate,
            "bytes": {metadata.value: size for metadata, size in self.nbytes.items()},
            "finding": None if self.finding is None else self.finding.record(),
        }


@dataclass(frozen=True, slots=True)
class Alike:
    """Layers that are the same but for their names.

    `facts` are None and `fault` says why for damaged ones. `aside` are layers outside the model's
    own numbering, such as multi-token prediction. `stopped` are the checks that a layer does not pass.
    """

    layers: tuple[str, ...]
    indices: tuple[int, ...]
    kind: Kind
    aside: bool
    facts: LayerFacts | None
    fault: str
    notes: tuple[str, ...]
    beside: tuple[str, ...]
    stopped: tuple[Finding, ...]

    @property
    def name(self) -> str:
        """The first layer's name, its index replaced by those of all; no other number of the name changes."""
        first = self.layers[0]
        if len(self.indices) != len(self.layers):
            return first if len(self.layers) == 1 else f"{first} and {len(self.layers) - 1} more"
        numbers = str(LayerList(merge((n, n) for n in self.indices)))
        before, _, after = around_index(first, self.indices[0])
        return f"{before}{numbers}{after}"

    def tensor_parallel(self, ranks: int) -> Cut | None:
        """All experts on every rank, each cut into that many parts; None where there are no banks."""
        return self._cut(ranks, 1)

    def expert_parallel(self, ranks: int) -> Cut | None:
        """Whole experts, spread over that many ranks; None where there are no banks."""
        return self._cut(1, ranks)

    def _cut(self, tensor: int, expert: int) -> Cut | None:
        if self.kind is not Kind.QUANTISED or self.facts is None:
            return None
        facts = replace(self.facts, tensor_parallel=tensor, expert_parallel=expert)
        seen = look_at(facts)
        if seen.grouping is None or facts.intermediate_per_rank is None:
            refused = next(f for f in seen.base if f.status is not Status.PASS)
            return Cut(Verdict.REFUSED, finding=refused)
        experts, hidden = len(split(facts.experts or 0, expert, 0)), facts.hidden or 0
        shape = BankShape(experts, hidden, facts.intermediate_per_rank)
        verdict = Verdict.REGROUPED if seen.grouping.regrouped else Verdict.NATIVE
        sizes = {m: len(self.layers) * banks_bytes(shape, m, seen.grouping) for m in Metadata}
        return Cut(verdict, seen.grouping.widest, experts, shape.intermediate, sizes)

    def record(self) -> dict[str, Plain]:
        cuts = {"tensor_parallel": self.tensor_parallel, "expert_parallel": self.expert_parallel}
        found: dict[str, Plain] = {
            way: {str(n): made.record() for n in SIZES if (made := cut(n)) is not None} for way, cut in cuts.items()
        }
        return {
            "name": self.name,
            "layers": list(self.layers),
            "count": len(self.layers),
            "kind": self.kind.value,
            "aside": self.aside,
            "facts": self.facts.record() if self.facts else None,
            "fault": self.fault or None,
            "stopped": [finding.record() for finding in self.stopped],
            "notes": list(self.notes),
            "beside": list(self.beside),
            **found,
        }


def banks_bytes(shape: BankShape, metadata: Metadata, grouping: Grouping) -> int:
    return shape.weight_bytes + shape.metadata_bytes(metadata, grouping.widest)


def inspect(checkpoint: Checkpoint, assumption: str | None = None) -> tuple[Alike, ...]:
    """The layers of a checkpoint, alike ones together, in the order of the first of each.

    `assumption` is what the operator takes for an arithmetic that is not known.
    """
    found: dict[Plain, Alike] = {}
    for layer in checkpoint.layers:
        one = look(checkpoint, layer, assumption)
        stack = () if layer.index is None else around_index(layer.name, layer.index)[::2]
        nameless = replace(one, layers=stack, indices=(), facts=_nameless(one.facts), fault=one.fault and layer.name)
        key = repr(nameless)
        known = found.get(key)
        joined = one if known is None else replace(
            known, layers=(*known.layers, *one.layers), indices=(*known.indices, *one.indices)
        )  # fmt: skip
        found[key] = joined
    return tuple(found.values())


def look(checkpoint: Checkpoint, layer: CheckpointLayer, assumption: str | None = None) -> Alike:
    """One layer by itself."""
    kind, facts, fault = Kind.DAMAGED, None, ""
    stopped: tuple[Finding, ...] = ()
    try:
        facts = checkpoint.facts(layer, tensor_parallel=1, tensor_rank=0, device=None)
        stopped = tuple(f for f in look_at(facts, assumption).base if f.status not in (Status.PASS, Status.SKIPPED))
        kind = _kind(facts, stopped)
        if kind is Kind.QUANTISED:
            checkpoint.check(layer)
    except CheckpointError as error:
        kind, fault = Kind.DAMAGED, str(error)
    return Alike(
        layers=(layer.name,),
        indices=() if layer.index is None else (layer.index,),
        kind=kind,
        aside=is_aside(checkpoint, layer),
        facts=facts,
        fault=fault,
        notes=layer.notes,
        beside=layer.beside,
        stopped=() if kind is Kind.UNQUANTISED else stopped,
    )


def is_aside(checkpoint: Checkpoint, layer: CheckpointLayer) -> bool:
    """Is it no layer of the model's own numbering (multi-token prediction, towers for images)?"""
    declared = layer.config.layers
    return layer.index is None or (declared is not None and layer.index >= declared)


def totals(found: tuple[Alike, ...]) -> Iterator[tuple[str, int, Mapping[Metadata, int] | None]]:
    """(way, ranks, bytes of all quantised layers on the fullest rank), None where a layer is refused."""
    for way in ("tensor_parallel", "expert_parallel"):
        for ranks in SIZES:
            cuts = [cut for one in found if (cut := getattr(one, way)(ranks)) is not None]
            if cuts:
                fits = all(cut.verdict is not Verdict.REFUSED for cut in cuts)
                yield way, ranks, {m: sum(cut.nbytes[m] for cut in cuts) for m in Metadata} if fits else None


def _kind(facts: LayerFacts, stopped: tuple[Finding, ...]) -> Kind:
    if facts.format == "none":
        return Kind.UNQUANTISED
    return Kind.UNREADABLE if stopped else Kind.QUANTISED


def _nameless(facts: LayerFacts | None) -> LayerFacts | None:
    return replace(facts, layer="", index=None) if facts else None
