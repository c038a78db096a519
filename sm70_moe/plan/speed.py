"""Which calls of a layer run machine code of its device, and which the portable route, which is slow."""

from __future__ import annotations

from sm70_moe.kernels.protocol import Broken
from sm70_moe.plan.plan import Plan

EVERYTHING = "all tokens"


def slow_tokens(plan: Plan, most: int | None = None) -> str:
    """Token counts whose first route is portable: "9+ tokens", "all tokens"; "" if every one has a native route.

    `most`: no call is longer.
    """
    starts, spans = plan.token_starts, []
    for place, first in enumerate(starts):
        after = starts[place + 1] if place + 1 < len(starts) else None
        if (most is None or first <= most) and not is_native(plan, first):
            spans.append((first, None if after is None else after - 1))
    joined: list[tuple[int, int | None]] = []
    for first, last in spans:
        if joined and joined[-1][1] == first - 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    if joined == [(1, None)]:
        return EVERYTHING
    return ", ".join(span_text(*span) for span in joined) + (" tokens" if joined else "")


def is_native(plan: Plan, tokens: int) -> bool:
    """Has the first route that takes so many tokens machine code of its own?"""
    routes = plan.reachable(tokens)
    backend = plan.admission.machine.backends.get(routes[0].backend) if routes else None
    return backend is not None and not isinstance(backend, Broken) and backend.native


def span_text(first: int, last: int | None) -> str:
    if last is None:
        return f"{first}+"
    return str(first) if first == last else f"{first}-{last}"


def speed_text(plan: Plan) -> str:
    """ "native", "portable (slow: 9+ tokens)", or that no route of ours runs the layer."""
    if not plan.supported:
        return "not by us" if plan.admission.foreign else "nothing can"
    slow = slow_tokens(plan)
    return f"portable (slow: {slow})" if slow else "native"
