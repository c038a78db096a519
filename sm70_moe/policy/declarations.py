"""Rules about backends: a route promises only what its backend is declared to run.

Built-in backends are declared in `kernels.declared`; what a plug-in runs is asked of it at admission.
"""

from __future__ import annotations

from collections.abc import Iterator

from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import capability
from sm70_moe.policy.draft import Draft
from sm70_moe.policy.fault import Fault
from sm70_moe.policy.lines import KeyPath
from sm70_moe.policy.route import CallConditions, Route
from sm70_moe.policy.wording import shown


def declaration_faults(draft: Draft) -> Iterator[Fault]:
    """Faults of routes against what their backends run, once a place."""
    told: set[KeyPath] = set()
    for place, route in draft.routes:
        ability = capability(route.backend)
        if ability is None:
            continue
        for fault in (*of_route(("route", place), route, ability), *of_contract(draft, route, ability)):
            if fault.where not in told:
                told.add(fault.where)
                yield fault


def of_route(where: KeyPath, route: Route, ability: Capability) -> Iterator[Fault]:
    """Tokens, order of the banks, and a call's dtypes."""
    tokens, who = route.tokens, f"which backend {route.backend} runs"
    if not ability.tokens.covers(tokens.first, tokens.last):
        yield Fault((*where, "tokens"), f"{tokens} tokens", f"{ability.tokens} tokens, {who}")
    if route.order is not None and route.order not in ability.reads.orders:
        accepted = " or ".join(map(shown, sorted(ability.reads.orders)))
        yield Fault((*where, "order"), shown(route.order), f"{accepted}, which backend {route.backend} reads")
    if route.call is not None:
        yield from of_call((*where, "call"), route.call, ability, who)


def of_call(where: KeyPath, call: CallConditions, ability: Capability, who: str) -> Iterator[Fault]:
    """A condition that no call which the backend takes can meet."""
    accepted = {"x": sorted(ability.dtypes), "ids": ["int32"], "weights": ["float32"]}
    for key, dtypes in accepted.items():
        found = getattr(call, key)
        if found is not None and found not in dtypes:
            yield Fault((*where, key), shown(found), f"{' or '.join(map(shown, dtypes))}, {who}")


def of_contract(draft: Draft, route: Route, ability: Capability) -> Iterator[Fault]:
    """Sizes and a prepared group that the backend's kernels do not take."""
    contract, who = draft.contract, f"which backend {route.backend} runs"
    group, groups = contract.weights.prepared_group, ability.reads.groups
    if group is not None and groups is not None and group not in groups:
        accepted = ", ".join(map(str, sorted(groups)))
        yield Fault(("contract", "weights", "prepared_group"), str(group), f"{accepted}, {who}")
    for name in ("hidden", "intermediate", "experts", "top_k"):
        size, unit, most = getattr(contract, name), ability.multiples.get(name, 1), ability.most.get(name)
        if size is not None and size % unit:
            yield Fault(("contract", name), str(size), f"a multiple of {unit}, {who}")
        if size is not None and most is not None and size > most:
            yield Fault(("contract", name), str(size), f"at most {most}, {who}")
