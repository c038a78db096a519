"""Rules about all routes together: does every call find one, and does every route get calls?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sm70_moe.policy.draft import Draft
from sm70_moe.policy.fault import Fault
from sm70_moe.policy.route import Route, TokenRange
from sm70_moe.policy.wording import shown

Routes = tuple[tuple[int, Route], ...]


COVERING = {"feature", "tokens", "call"}


def coverage_faults(draft: Draft) -> Iterator[Fault]:
    """Faults of the route list as a whole."""
    if draft.route_faults <= COVERING:
        yield from orders(draft.routes)
    if draft.route_faults <= {"order"}:
        yield from gaps(draft.routes)
        yield from last_resort(draft.routes)
        yield from unreachable(draft.routes)
        yield from duplicates(draft.routes)


def gaps(routes: Routes) -> Iterator[Fault]:
    """Token counts without a route; and those that lose it when a flag is off or a condition fails."""
    none = uncovered([route.tokens for _, route in routes])
    for gap in none:
        yield Fault(("route",), f"no route for {gap} tokens", "every token count from 1 has a route", "gap")
    for gap in uncovered([*none, *(route.tokens for _, route in routes if route.unconditional)]):
        accepted = "a route without feature and call for every token count"
        yield Fault(("route",), f"only conditional routes for {gap} tokens", accepted, "gap")


def uncovered(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """What the ranges leave of 1 and more."""
    left: list[TokenRange] = []
    first = 1
    for tokens in sorted(ranges, key=lambda r: r.first):
        if tokens.first > first:
            left.append(TokenRange(first=first, last=tokens.first - 1))
        if tokens.last is None:
            return tuple(left)
        first = max(first, tokens.last + 1)
    return (*left, TokenRange(first=first, last=None))


def last_resort(routes: Routes) -> Iterator[Fault]:
    """The last route takes whatever no other route took."""
    place, route = routes[-1]
    conditions = {"feature": route.feature, "call": route.call, "tokens": route.tokens.last}
    limits = [key for key, value in conditions.items() if value is not None]
    if limits:
        accepted = "a last route without feature, call and last token"
        yield Fault(("route", place), f"{route.name} limited by {', '.join(limits)}", accepted, "no last resort")


def unreachable(routes: Routes) -> Iterator[Fault]:
    """A route whose every call an earlier one takes, whatever the flags say."""
    for at, (place, route) in enumerate(routes):
        earlier = [other for _, other in routes[:at] if other.unconditional]
        if not any(overlaps(gap, route.tokens) for gap in uncovered([other.tokens for other in earlier])):
            names = ", ".join(other.name for other in earlier)
            found = f"all of {route.tokens} tokens taken by {names}"
            yield Fault(("route", place), found, "a route that can be reached", f"{route.name} is unreachable")


def duplicates(routes: Routes) -> Iterator[Fault]:
    """Two routes that the same flag and the same conditions open for the same tokens."""
    for at, (place, route) in enumerate(routes):
        for _, other in routes[:at]:
            alike = (other.feature, other.call) == (route.feature, route.call) and not route.unconditional
            if alike and overlaps(other.tokens, route.tokens):
                found = f"{route.tokens} beside {other.tokens} of {other.name}"
                accepted = "other tokens or other conditions than an earlier route"
                yield Fault(("route", place, "tokens"), found, accepted, "duplicate")


def orders(routes: Routes) -> Iterator[Fault]:
    """A fallback must read the banks that are there: all routes read one order."""
    for place, route in routes[1:]:
        first = routes[0][1]
        if route.order != first.order:
            accepted = f"{shown(first.order or 'none')} as {first.name}: a fallback reads the same banks"
            yield Fault(("route", place, "order"), shown(route.order or "none"), accepted)


def overlaps(a: TokenRange, b: TokenRange) -> bool:
    return a.first in b or b.first in a
