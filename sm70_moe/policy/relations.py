"""Rules about names: every part that another part names must be there, and be of the right kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sm70_moe.policy.draft import Draft
from sm70_moe.policy.fault import Fault
from sm70_moe.policy.wording import one_of, shown
from sm70_moe.settings.variables import BUILD_NAMES, FLAGS, PREFIXES, SETTINGS, own_name


def relation_faults(draft: Draft, unknown_backends: Callable[[Iterable[str]], dict[str, str]]) -> Iterator[Fault]:
    """Faults between parts. `unknown_backends` maps names to what is accepted instead."""
    yield from needs(draft)
    yield from stand_ins(draft)
    yield from cycles(draft)
    yield from kinds(draft)
    yield from variables(draft)
    yield from own_names(draft)
    yield from route_names(draft)
    yield from route_features(draft)
    yield from backends(draft, unknown_backends)
    yield from evidence(draft)


def needs(draft: Draft) -> Iterator[Fault]:
    for name, feature in draft.features.items():
        for place, need in enumerate(feature.needs):
            if need not in draft.feature_names:
                accepted = one_of(need, draft.feature_names - {name})
                yield Fault(("features", name, "needs", place), shown(need), accepted, "unknown feature")


def stand_ins(draft: Draft) -> Iterator[Fault]:
    """Features that another one does not step in for."""
    for name, feature in draft.features.items():
        for place, other in enumerate(feature.unless_off):
            if other not in draft.feature_names - {name}:
                accepted = one_of(other, draft.feature_names - {name})
                yield Fault(("features", name, "unless_off", place), shown(other), accepted, "unknown feature")


def cycles(draft: Draft) -> Iterator[Fault]:
    """Features that need each other, each ring once: at its first feature in the file."""
    order = list(draft.features)
    for name in order:
        ring = way_back(draft, name, order.index(name))
        if ring:
            found = " -> ".join((*ring, name))
            yield Fault(("features", name, "needs"), found, "features that do not need each other", "cycle")


def way_back(draft: Draft, start: str, since: int) -> tuple[str, ...]:
    """A way along `needs` from a feature to itself through features that stand behind it; () if there is none."""
    later = set(list(draft.features)[since:])
    ways: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        for need in draft.features[way[-1]].needs:
            if need == start:
                return way
            if need in later and need not in seen:
                seen.add(need)
                ways.append((*way, need))
    return ()


def kinds(draft: Draft) -> Iterator[Fault]:
    """What only makes sense for one kind of feature."""
    for name, feature in draft.features.items():
        where = ("features", name)
        if feature.kind == "route" and name not in draft.route_features:
            yield Fault(where, "no route of this feature", "a [[route]] that names it", "feature of kind route")
        if feature.kind != "layout":
            for key in ("metadata", "batches"):
                if getattr(feature, key):
                    found = f"{key} in a feature of kind {feature.kind}"
                    yield Fault((*where, key), found, "this key in features of kind layout only")


def variables(draft: Draft) -> Iterator[Fault]:
    """Each variable belongs to one flag: `SM70_MOE_<NAME>` to the feature of that name, a setting's to the setting."""
    owners = {own_name(name): name for name in draft.feature_names}
    for name, feature in draft.features.items():
        for place, variable in enumerate(feature.env):
            owner = TAKEN.get(variable) or owners.setdefault(variable, name)
            twice = feature.env.index(variable) < place
            if owner != name or twice:
                found = f"{variable}, which {owner} has already"
                yield Fault(("features", name, "env", place), found, "a variable of one feature, named once")
            elif variable in FOREIGN and FOREIGN[variable] != name:
                found = f"{variable}, which belongs to the flag {FOREIGN[variable]} of the shipped policies"
                yield Fault(("features", name, "env", place), found, "a variable of this feature alone")


TAKEN = {
    **dict.fromkeys(BUILD_NAMES, "the build of the package"),
    **{name: f"the setting {row.setting}" for row in SETTINGS for name in row.names},
}
"""Variables that are read for something else than a flag."""

FOREIGN = {own_name(row.setting): row.setting for row in FLAGS}
"""Flags that every policy's operator may give: under its own name, nothing else may read one."""


def own_names(draft: Draft) -> Iterator[Fault]:
    """Names that settings own, and variables that nobody would read."""
    for feature, declared in draft.features.items():
        if own_name(feature) in TAKEN:
            accepted = f"another name: {own_name(feature)} belongs to {TAKEN[own_name(feature)]}"
            yield Fault(("features", feature), shown(feature), accepted, "name")
        for place, name in enumerate(declared.env):
            if not name.startswith(PREFIXES):
                accepted = f"a name that begins with {' or '.join(PREFIXES)}"
                yield Fault(("features", feature, "env", place), shown(name), accepted, "never read")


def route_names(draft: Draft) -> Iterator[Fault]:
    seen: set[str] = set()
    for place, route in draft.routes:
        where = ("route", place, "name")
        if route.name in seen:
            yield Fault(where, shown(route.name), "a name that no earlier route has", "duplicate")
        if route.name in draft.feature_names and route.feature != route.name:
            yield Fault(where, shown(route.name), "another name: a feature is named so that is not this route's")
        seen.add(route.name)


def route_features(draft: Draft) -> Iterator[Fault]:
    for place, route in draft.routes:
        if route.feature is None:
            continue
        where = ("route", place, "feature")
        feature = draft.features.get(route.feature)
        if route.feature not in draft.feature_names:
            yield Fault(where, shown(route.feature), one_of(route.feature, draft.feature_names), "unknown feature")
        elif feature and feature.kind != "route":
            yield Fault(where, f"{route.feature} of kind {feature.kind}", "a feature of kind route")


def backends(draft: Draft, unknown_backends: Callable[[Iterable[str]], dict[str, str]]) -> Iterator[Fault]:
    unknown = unknown_backends(route.backend for _, route in draft.routes)
    for place, route in draft.routes:
        if route.backend in unknown:
            yield Fault(("route", place, "backend"), shown(route.backend), unknown[route.backend], "unknown backend")


def evidence(draft: Draft) -> Iterator[Fault]:
    for place, route in draft.evidence_routes:
        if route not in draft.route_names:
            yield Fault(("evidence", place, "route"), shown(route), one_of(route, draft.route_names), "unknown route")
