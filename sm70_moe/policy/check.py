"""Checking a document: every fault of it, those of single keys and those between parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from sm70_moe.kernels.declared import BUILT_IN
from sm70_moe.policy.coverage import coverage_faults
from sm70_moe.policy.declarations import declaration_faults
from sm70_moe.policy.document import Policy
from sm70_moe.policy.draft import Draft, draft_of, salvage
from sm70_moe.policy.fault import Fault, fault_of
from sm70_moe.policy.geometry import geometry_faults
from sm70_moe.policy.relations import relation_faults
from sm70_moe.policy.wording import one_of


def check(document: dict[str, Any], origin: str, backends: Iterable[str] | None) -> tuple[Policy | None, list[Fault]]:
    """The policy and no faults, or faults and perhaps a policy; only without faults is it usable."""
    try:
        policy = Policy.read(document, origin)
    except ValidationError as error:
        faults = [fault_of(detail) for detail in error.errors(include_url=False)]
        return None, faults + list(rules(salvage(document), backends))
    return policy, list(rules(draft_of(policy), backends))


def rules(draft: Draft, backends: Iterable[str] | None) -> Iterator[Fault]:
    """What the rules between the parts of a document find."""

    def unknown(names: Iterable[str]) -> dict[str, str]:
        return unknown_backends(names, backends)

    yield from geometry_faults(draft)
    yield from relation_faults(draft, unknown)
    yield from declaration_faults(draft)
    yield from coverage_faults(draft)


def unknown_backends(names: Iterable[str], backends: Iterable[str] | None) -> dict[str, str]:
    """Names of backends that are not there -> what is accepted.

    The registry is asked only where a name is not one of ours: it reads the metadata of every
    installed package.
    """
    known = BUILT_IN if backends is None else frozenset(backends)
    missing = set(names) - known
    if missing and backends is None:
        known |= registered()
    return {name: one_of(name, known) for name in missing - known}


def registered() -> frozenset[str]:
    """Names of all backends, plug-ins too. By name, so that policies do not depend on kernels."""
    return frozenset(import_module("sm70_moe.kernels.registry").Registry().names())
