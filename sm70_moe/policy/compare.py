"""Comparing: in which keys two policies differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sm70_moe.decision import Plain
from sm70_moe.policy.document import Policy


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs, as a dotted path; None stands for a key that one side does not have."""

    key: str
    a: Plain
    b: Plain


def compare_policies(a: Policy, b: Policy) -> tuple[Difference, ...]:
    """Every difference in content, in the order of the keys; empty exactly if the digests are equal.

    Routes are compared by name; if their order differs, the key `routes` lists the names.
    """
    left, right = dict(flat("", content(a))), dict(flat("", content(b)))
    keys = dict.fromkeys([*left, *right])
    return tuple(Difference(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key))


def content(policy: Policy) -> dict[str, Any]:
    """A policy's record, its routes under their names."""
    record = policy.record()
    routes = record["route"]
    return record | {"route": {r["name"]: r for r in routes}, "routes": [r["name"] for r in routes]}


def flat(path: str, value: Any) -> Iterator[tuple[str, Plain]]:
    """(dotted path, value) of every leaf; an array of plain values is a leaf."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(f"{path}.{key}" if path else key, item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            yield from flat(f"{path}[{place}]", item)
    else:
        yield path, value
