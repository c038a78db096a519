"""Ranks compare their plans before the first kernel runs.

Each rank tells the others what its plans are made of, once. `reconcile` then says, from the same
reports and so alike on every rank, whether they agree; `gathering` carries the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm70_moe.admission.admit import admit
from sm70_moe.decision import Finding, Plain, Reason, Status, obstacle_text
from sm70_moe.errors import RankDisagreement
from sm70_moe.plan.gathering import gather, ranks_text
from sm70_moe.plan.plan import Difference, Plan, differences

if TYPE_CHECKING:
    import torch.distributed as dist

SECONDS = 60.0
"""How long a rank waits for the others. Admission takes milliseconds; loading weights comes later."""

SHOWN = 3
"""Differing fields that an error names of each rank."""

RUN = ("routes", "layout", "resident_tokens", "facts", "policy", "architecture")
"""Fields of a plan that alter what a rank runs; after falling back only these must be equal."""

CAUSES = ("plan", "policy", "flags", "build", "architecture", "facts", "resident_tokens")
"""Fields that others follow from: told first."""

WORD, OBSTACLES = "disagreement", "obstacles"

Report = Mapping[str, Mapping[str, Plain]]
"""One rank's plans: layer -> `Plan.fields()`, the policy's word on disagreement, and what stopped each feature."""


@dataclass(frozen=True, slots=True)
class Odd:
    """One field in which ranks differ from rank 0, alike in all these layers."""

    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    difference: Difference

    @property
    def text(self) -> str:
        return f"{ranks_text(self.ranks)}: {layers_text(self.layers)}: {self.field_text}"

    @property
    def field_text(self) -> str:
        found = self.difference
        return f"{found.field} is {found.second!r}, {found.first!r} on rank 0"


@dataclass(frozen=True, slots=True)
class Lack:
    """A feature of a layer that one rank has not while another has it; why, as reasons and in words."""

    rank: int
    layer: str
    feature: str
    reasons: tuple[str, ...] = ()
    text: str = ""

    def record(self) -> dict[str, Plain]:
        told: dict[str, Plain] = {"rank": self.rank, "layer": self.layer, "feature": self.feature}
        return {**told, "reasons": list(self.reasons), "text": self.text}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks' reports come to, alike on every rank.

    `lacks` are the features that are not admitted on every rank, with each rank that lacks one;
    `required` those of them that a rank requires. Without `odds` the ranks agree.
    """

    odds: tuple[Odd, ...]
    lacks: tuple[Lack, ...]
    required: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(odd.text for odd in self.odds)

    @property
    def disputed(self) -> dict[str, tuple[str, ...]]:
        """Layer -> its features that are not admitted on every rank."""
        return {layer: self.features(layer) for layer in dict.fromkeys(lack.layer for lack in self.lacks)}

    def features(self, layer: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(lack.feature for lack in self.lacks if lack.layer == layer))


def report(plans: Sequence[Plan]) -> Report:
    """What the other ranks are told."""
    return {
        plan.layer: {
            **plan.fields(),
            WORD: plan.admission.policy.on.disagreement,
            OBSTACLES: {d.feature: obstacles(d.obstacles) for d in plan.decisions if not d.admitted},
        }
        for plan in plans
    }


def obstacles(findings: Sequence[Finding]) -> Plain:
    """Reasons and words; a skipped check is no reason of its own."""
    told = [finding for finding in findings if finding.status is not Status.SKIPPED]
    return {
        "reasons": [finding.reason.name for finding in told if finding.reason],
        "text": "; ".join(f"{finding.check}: {obstacle_text(finding)}" for finding in told),
    }


def lenient(reports: Sequence[Report]) -> bool:
    """Does every plan of every rank say "fall-back"? All must come to the same answer."""
    return all(fields[WORD] == "fall-back" for one in reports for fields in one.values())


def reconcile(reports: Sequence[Report], only: tuple[str, ...] | None = None) -> Verdict:
    """Compare every rank with rank 0, layer by layer; `only` limits the fields that count."""
    layers = tuple(dict.fromkeys(name for one in reports for name in one))
    lacks = tuple(lack for layer in layers for lack in layer_lacks(layer, reports))
    return Verdict(odds(layers, reports, only), lacks, tuple(required(lacks, reports)))


def odds(layers: Sequence[str], reports: Sequence[Report], only: tuple[str, ...] | None) -> tuple[Odd, ...]:
    """Differences that are the same in several layers and on several ranks are one; causes go first."""
    places: dict[str, tuple[Difference, dict[int, list[str]]]] = {}
    for layer in layers:
        for rank, found in layer_differences(layer, reports, only):
            _, ranks = places.setdefault(repr(found), (found, {}))
            ranks.setdefault(rank, []).append(layer)
    told: dict[tuple[str, tuple[str, ...]], tuple[Difference, list[int]]] = {}
    for key, (found, ranks) in places.items():
        for rank, where in ranks.items():
            told.setdefault((key, tuple(where)), (found, []))[1].append(rank)
    made = [Odd(tuple(ranks), where, found) for (_, where), (found, ranks) in told.items()]
    return tuple(sorted(made, key=lambda odd: (odd.ranks, cause(odd.difference.field))))


def cause(field: str) -> int:
    top = field.split(".")[0]
    return CAUSES.index(top) if top in CAUSES else len(CAUSES)


def layer_differences(
    layer: str, reports: Sequence[Report], only: tuple[str, ...] | None
) -> Iterator[tuple[int, Difference]]:
    """(rank, field that is another one than on rank 0)."""
    first = reports[0].get(layer)
    for rank, one in enumerate(reports):
        here = one.get(layer)
        if first is not None and here is not None:
            for found in differences("", first, here):
                top = found.field.split(".")[0]
                if top != OBSTACLES and (only is None or top in only):
                    yield rank, found
        elif (first is None) != (here is None):
            yield (
                rank,
                Difference("plan", "missing" if first is None else "made", "missing" if here is None else "made"),
            )


def layer_lacks(layer: str, reports: Sequence[Report]) -> Iterator[Lack]:
    """Features that some ranks have admitted and others have not, with every rank that has not."""
    admitted = [{name for name, word in outcomes(one, layer).items() if word == "admitted"} for one in reports]
    for feature in sorted(admitted[0].union(*admitted) - admitted[0].intersection(*admitted)):
        for rank, one in enumerate(reports):
            if feature not in admitted[rank]:
                why = mapping(mapping(one.get(layer, {}).get(OBSTACLES)).get(feature))
                reasons = why.get("reasons", ())
                names = tuple(map(str, reasons)) if isinstance(reasons, list | tuple) else ()
                yield Lack(rank, layer, feature, names, str(why.get("text", "")))


def required(lacks: Sequence[Lack], reports: Sequence[Report]) -> Iterator[str]:
    """ "LAYER: qpn_m1 is required on rank 1, not admitted on rank 3 (BUILD_MISSING)", alike layers once."""
    found: dict[str, list[str]] = {}
    for layer in dict.fromkeys(lack.layer for lack in lacks):
        mine = [lack for lack in lacks if lack.layer == layer]
        for feature in dict.fromkeys(lack.feature for lack in mine):
            wanted = requiring(layer, feature, reports)
            if wanted:
                ranks = ", ".join(
                    f"rank {lack.rank} ({reasons_text(lack)})" for lack in mine if lack.feature == feature
                )
                text = f"{feature} is required on {ranks_text(wanted)}, not admitted on {ranks}"
                found.setdefault(text, []).append(layer)
    return (f"{layers_text(layers)}: {text}" for text, layers in found.items())


def reasons_text(lack: Lack) -> str:
    return ", ".join(lack.reasons) or "no plan"


def requiring(layer: str, feature: str, reports: Sequence[Report]) -> tuple[int, ...]:
    """Ranks with the flag at 1."""
    flags = [mapping(one.get(layer, {}).get("flags")) for one in reports]
    return tuple(rank for rank, found in enumerate(flags) if found.get(feature) == "require")


def outcomes(one: Report, layer: str) -> Mapping[str, Plain]:
    return mapping(one.get(layer, {}).get("outcomes"))


def mapping(value: Plain) -> Mapping[str, Plain]:
    return value if isinstance(value, Mapping) else {}


def layers_text(layers: Sequence[str]) -> str:
    more = len(layers) - 1
    return layers[0] + (f" and {more} more layer{'s' if more > 1 else ''}" if more else "")


def without(plan: Plan, lacks: Sequence[Lack]) -> Plan:
    """The plan of the same layer where these features are not admitted, since other ranks lack them."""
    if not lacks:
        return plan
    admission = plan.admission
    objections = {
        name: Finding.failed(
            "other ranks",
            Reason.RANKS_DISAGREE,
            "admitted on every rank",
            [lack.record() for lack in lacks if lack.feature == name],
        )
        for name in dict.fromkeys(lack.feature for lack in lacks)
    }
    objections = {**admission.objections, **objections}
    return Plan(admit(admission.policy, admission.settings, admission.facts, admission.machine, objections))


def agree(
    plans: Sequence[Plan], group: dist.ProcessGroup | None = None, *, seconds: float = SECONDS, refused: str = ""
) -> tuple[Plan, ...]:
    """The plans that every rank of the group will run; call it on every rank, with its plans in any order.

    If the ranks differ, the policy's `disagreement` decides for all of them: "fall-back" takes back
    the features that not every rank has, "raise" raises. A feature that any rank requires is never
    taken back. `refused` says why this rank will not run, if it will not: all ranks raise then.
    Raises RankDisagreement, on every rank, naming ranks and the first differing fields; also where a
    rank is gone, or does not answer within `seconds`.
    """
    import torch.distributed as dist

    def told(made: Sequence[Plan]) -> list[Report]:
        return reports_of(gather(json.dumps([refused, report(made)]).encode(), group, seconds))

    reports = told(plans)
    verdict = reconcile(reports)
    if not verdict.odds:
        return tuple(plans)
    if verdict.required or not lenient(reports):
        raise disagreement(verdict)
    agreed = fallen_back(plans, verdict, lambda lack: lack.rank != dist.get_rank(group))
    left = reconcile(told(agreed), RUN)
    if left.odds:
        raise disagreement(left)
    return agreed


def fallen_back(plans: Sequence[Plan], verdict: Verdict, counts: Callable[[Lack], bool]) -> tuple[Plan, ...]:
    """The plans without what other ranks lack; what a rank itself lacks, its own findings say already."""
    lacks: dict[str, list[Lack]] = {}
    for lack in filter(counts, verdict.lacks):
        lacks.setdefault(lack.layer, []).append(lack)
    return tuple(without(plan, lacks.get(plan.layer, ())) for plan in plans)


def reports_of(answers: Sequence[bytes]) -> list[Report]:
    """Every rank's report; RankDisagreement names the ranks that refused, and why."""
    found = [json.loads(answer) for answer in answers]
    refusals = [f"rank {rank} refused: {refused}" for rank, (refused, _) in enumerate(found) if refused]
    if refusals:
        raise RankDisagreement(*refusals)
    return [one for _, one in found]


def disagreement(verdict: Verdict) -> RankDisagreement:
    """Names every rank that differs, with its first differing fields."""
    groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Odd]] = {}
    for odd in verdict.odds:
        groups.setdefault((odd.ranks, odd.layers), []).append(odd)
    texts = [*verdict.required, *(group_text(found) for found in groups.values())]
    return RankDisagreement("ranks hold different plans: " + "; ".join(texts))


def group_text(found: Sequence[Odd]) -> str:
    more = f", and {len(found) - SHOWN} more fields" if len(found) > SHOWN else ""
    fields = ", ".join(odd.field_text for odd in found[1:SHOWN])
    return found[0].text + (f", {fields}" if fields else "") + more
