"""Draft: the parts of a policy document that are valid by themselves.

The rules that look at several parts run on a draft, so that one misspelt key does not hide what
else is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sm70_moe.policy.contract import Contract
from sm70_moe.policy.document import Policy
from sm70_moe.policy.feature import Feature
from sm70_moe.policy.route import Route

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Draft:
    """Valid parts, arrays with each item's place in the file.

    `evidence_routes`, `feature_names`, `route_names` and `route_features` hold what invalid parts
    name too. `route_faults` are the keys that are wrong in some route, `route` for a route that is
    left out: rules about all routes together hold only if the keys that they read are right in
    every route.
    """

    contract: Contract
    features: Mapping[str, Feature]
    routes: tuple[tuple[int, Route], ...]
    evidence_routes: tuple[tuple[int, str], ...]
    feature_names: frozenset[str]
    route_names: frozenset[str]
    route_features: frozenset[str]
    route_faults: frozenset[str] = frozenset()


def draft_of(policy: Policy) -> Draft:
    """The draft of a policy whose parts are all valid."""
    return Draft(
        contract=policy.contract,
        features=policy.features,
        routes=tuple(enumerate(policy.routes)),
        evidence_routes=tuple((place, item.route) for place, item in enumerate(policy.evidence)),
        feature_names=frozenset(policy.features),
        route_names=frozenset(route.name for route in policy.routes),
        route_features=frozenset(route.feature for route in policy.routes if route.feature),
    )


def salvage(document: Mapping[str, Any]) -> Draft:
    """The draft of a document of which some parts are invalid."""
    features, routes = document.get("features"), document.get("route")
    named = features if isinstance(features, dict) else {}
    listed = routes if isinstance(routes, list) else []
    found = [part(Route, value) for value in listed]
    faults = {"route"} if not listed or any(route is None for route, _ in found) else set()
    return Draft(
        contract=part(Contract, document.get("contract"))[0] or Contract(),
        features={name: feature for name, value in named.items() if (feature := part(Feature, value)[0])},
        routes=tuple((place, route) for place, (route, _) in enumerate(found) if route),
        evidence_routes=tuple(texts(document.get("evidence"), "route")),
        feature_names=frozenset(named),
        route_names=frozenset(name for _, name in texts(listed, "name")),
        route_features=frozenset(name for _, name in texts(listed, "feature")),
        route_faults=frozenset(faults.union(*(keys for _, keys in found))),
    )


def part(model: type[M], value: Any) -> tuple[M | None, set[str]]:
    """A part without its invalid keys, which were reported with the whole document; and those keys."""
    try:
        return model.model_validate(value), set()
    except ValidationError as error:
        places = [detail["loc"] for detail in error.errors(include_url=False)]
    keys = {str(place[0]) for place in places if place}
    for removed in (places, [place[:1] for place in places]):
        try:
            return model.model_validate(without(value, removed)), keys
        except ValidationError:
            continue  # a key inside a table is required there: remove the table
    return None, keys


def without(value: Any, places: list[tuple[int | str, ...]]) -> Any:
    """A table without the keys at these places; keys of tables in it go alone, an array goes whole."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        inner = [place[1:] for place in places if place[:1] == (key,)]
        if not inner or (isinstance(item, dict) and all(inner)):
            kept[key] = without(item, inner)
    return kept


def texts(tables: Any, key: str) -> Iterator[tuple[int, str]]:
    """(place, text) of this key in each table of an array, where it is text."""
    for place, table in enumerate(tables if isinstance(tables, list) else []):
        if isinstance(table, dict) and isinstance(table.get(key), str):
            yield place, table[key]
