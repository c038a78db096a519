"""Ranks compare their plans before the first kernel runs.

Each rank tells the others what its plans are made of, once. `reconcile` then says, from the same
reports and so alike on every rank, whether they agree; the distributed part only carries bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from sm70_moe.admission.admit import admit
from sm70_moe.decision import Finding, Plain, Reason
from sm70_moe.errors import RankDisagreement
from sm70_moe.plan.plan import Difference, Plan, differences

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SECONDS = 60.0
"""How long a rank waits for the others. Admission takes milliseconds; loading weights comes later."""

SHOWN = 5
"""Differing fields that an error names."""

RUN = ("routes", "layout", "resident_tokens", "facts", "policy", "architecture")
"""Fields of a plan that alter what a rank runs; after falling back only these must be equal."""

WORD = "disagreement"

Report = Mapping[str, Mapping[str, Plain]]
"""One rank's plans: layer -> `Plan.fields()`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks' reports come to, alike on every rank.

    `disputed` maps a layer to the features that are not admitted on every rank. `texts` are the
    differences, with ranks and fields. Without texts the ranks agree.
    """

    texts: tuple[str, ...]
    disputed: Mapping[str, tuple[str, ...]]
    required: tuple[str, ...]


def report(plans: Sequence[Plan]) -> Report:
    """What the other ranks are told; the policy's word on disagreement is part of it."""
    return {plan.layer: {**plan.fields(), WORD: plan.admission.policy.on.disagreement} for plan in plans}


def lenient(reports: Sequence[Report]) -> bool:
    """Does every plan of every rank say "fall-back"? All must come to the same answer."""
    return all(fields[WORD] == "fall-back" for one in reports for fields in one.values())


def reconcile(reports: Sequence[Report], only: tuple[str, ...] | None = None) -> Verdict:
    """Compare every rank with rank 0, layer by layer; `only` limits the fields that count."""
    texts: list[str] = []
    disputed: dict[str, tuple[str, ...]] = {}
    required: list[str] = []
    for layer in dict.fromkeys(name for one in reports for name in one):
        texts += layer_differences(layer, reports, only)
        found = disputed_features(layer, reports)
        if found:
            disputed[layer] = found
        required += [f"{layer}: {name} is required" for name in found if wanted_somewhere(layer, name, reports)]
    return Verdict(tuple(texts), disputed, tuple(required))


def layer_differences(layer: str, reports: Sequence[Report], only: tuple[str, ...] | None) -> Iterator[str]:
    """ "rank 2: LAYER: flags.qpn_m1 is off, auto on rank 0"."""
    first = reports[0].get(layer)
    for rank, one in enumerate(reports):
        here = one.get(layer)
        if first is None or here is None:
            if (first is None) != (here is None):
                have, lack = (0, rank) if here is None else (rank, 0)
                yield f"rank {rank}: {layer}: rank {lack} has no plan for it, rank {have} has one"
            continue
        for found in field_differences(first, here, only):
            yield f"rank {rank}: {layer}: {found.field} is {found.second!r}, {found.first!r} on rank 0"


def field_differences(
    first: Mapping[str, Plain], here: Mapping[str, Plain], only: tuple[str, ...] | None
) -> Iterator[Difference]:
    for found in differences("", first, here):
        if only is None or found.field.split(".")[0] in only:
            yield found


def disputed_features(layer: str, reports: Sequence[Report]) -> tuple[str, ...]:
    """Features that some ranks have admitted and others have not."""
    admitted: list[set[str]] = [
        {name for name, word in outcomes(one, layer).items() if word == "admitted"} for one in reports
    ]
    some, every = admitted[0].union(*admitted), admitted[0].intersection(*admitted)
    return tuple(sorted(some - every))


def wanted_somewhere(layer: str, feature: str, reports: Sequence[Report]) -> bool:
    return any(mapping(one.get(layer, {}).get("flags")).get(feature) == "require" for one in reports)


def outcomes(one: Report, layer: str) -> Mapping[str, Plain]:
    return mapping(one.get(layer, {}).get("outcomes"))


def mapping(value: Plain) -> Mapping[str, Plain]:
    return value if isinstance(value, Mapping) else {}


def without(plan: Plan, features: Sequence[str]) -> Plan:
    """The plan of the same layer where these features are not admitted, since not every rank has them."""
    admission = plan.admission
    objection = Finding.failed("other ranks", Reason.RANKS_DISAGREE, "admitted on every rank", "not on all of them")
    return Plan(
        admit(
            admission.policy,
            admission.settings,
            admission.facts,
            admission.machine,
            dict.fromkeys(features, objection),
        )
    )


def agree(
    plans: Sequence[Plan], group: dist.ProcessGroup | None = None, *, seconds: float = SECONDS
) -> tuple[Plan, ...]:
    """The plans that every rank of the group will run; call it on every rank, with its plans in any order.

    If the ranks differ, the policy's `disagreement` decides for all of them: "fall-back" takes back
    the features that not every rank has, "raise" raises. A feature that any rank requires is never
    taken back. Raises RankDisagreement, on every rank, naming ranks and the first differing fields;
    also where a rank does not answer within `seconds`.
    """
    reports = gather(report(plans), group, seconds)
    verdict = reconcile(reports)
    if not verdict.texts:
        return tuple(plans)
    if verdict.required or not lenient(reports):
        raise disagreement((*verdict.required, *verdict.texts))
    agreed = tuple(without(p, verdict.disputed[p.layer]) if p.layer in verdict.disputed else p for p in plans)
    left = reconcile(gather(report(agreed), group, seconds), RUN)
    if left.texts:
        raise disagreement(left.texts)
    return agreed


def disagreement(texts: Sequence[str]) -> RankDisagreement:
    more = f"; and {len(texts) - SHOWN} more differences" if len(texts) > SHOWN else ""
    return RankDisagreement("ranks hold different plans: " + "; ".join(texts[:SHOWN]) + more)


def gather(mine: Report, group: dist.ProcessGroup | None, seconds: float) -> list[Report]:
    """Every rank's report, in order of ranks."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    sizes = exchange(torch.tensor([len(text)], device=device), group, seconds)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    texts = exchange(padded, group, seconds)
    return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, sizes, strict=True)]


def exchange(mine: torch.Tensor, group: dist.ProcessGroup | None, seconds: float) -> list[torch.Tensor]:
    """all_gather with a deadline; a rank that is gone or late is a RankDisagreement."""
    import torch
    import torch.distributed as dist

    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(found, mine, group=group, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=seconds))
    except (RuntimeError, dist.DistError) as error:
        raise RankDisagreement(
            f"rank {dist.get_rank(group)}: not every rank of {dist.get_world_size(group)} answered within "
            f"{seconds:g} s: {str(error).splitlines()[0]}"
        ) from error
    return found
