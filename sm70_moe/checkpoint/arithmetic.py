"""What a layer's experts compute: known from config.json and the table of model types, or not known, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sm70_moe.checkpoint.fields import SHORT, Fields
from sm70_moe.checkpoint.model_types import Family, ModelTypes
from sm70_moe.facts import PLAIN

NEUTRAL: tuple[object, ...] = (None, False, 0, "", (), [], {})
"""Values of a key that nobody reads under which it changes nothing."""

INNER = ("moe", "ffn", "mlp", "expert", "swiglu")
"""Words of tables inside a model's own whose keys concern its experts too."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Facts of `LayerFacts` by the same names, and `doubt`: why something is not known, "" if all is."""

    arithmetic: str | None
    activation: str | None
    router_weight_on_input: bool | None
    doubt: str = ""


def arithmetic_of(fields: Fields, types: ModelTypes, index: int | None) -> Arithmetic:
    """What the experts of layer `index` compute, by the table of config.json that declares them.

    None as an index: a layer outside the model's numbering. Raises CheckpointError naming a key with a
    value of the wrong type.
    """
    name = fields.text("model_type")
    family = types.families.get(name or "")
    activation, doubts = _activation(fields, types, family, index)
    if family is None:
        known = "config.json states no model_type" if name is None else f"model type {name!r} is not in the table"
        doubts.insert(0, f"{known}, so what else its experts compute is not known")
    doubts += _unread(fields, types, family, activation)
    other = "" if family is None else family.differs
    other = other or next((f"{text} ({key} {fields.value(key)})" for key, text in _given(fields, types)), "")
    said = [flag for key in types.keys.router_weight if (flag := fields.flag(key)) is not None]
    weighted = True if any(said) else None if family is None else family.router_weight == "input"
    if doubts and not other:
        hint = f"{'; '.join(doubts)}; --assume plain-silu or SM70_MOE_ASSUME=plain-silu if it is known to be plain"
        return Arithmetic(None, activation, weighted, hint)
    return Arithmetic(other or PLAIN, activation, weighted)


def _activation(
    fields: Fields, types: ModelTypes, family: Family | None, index: int | None
) -> tuple[str | None, list[str]]:
    """The activation's name, with what clamps it, and doubts."""
    keys = types.keys.activation
    if family is not None and family.activation_is:
        name: str | None = family.activation_is
    elif family is not None and "." in family.activation:
        table, _, key = family.activation.rpartition(".")
        inner = fields.inner(table)
        name = None if inner is None else inner.text(key)
    else:
        name = fields.text(*keys) if family is None or family.activation in keys else fields.text(family.activation)
    for key in types.keys.clamp:
        limit, doubt = _limit(fields, key, index)
        if doubt:
            return name, [doubt]
        if limit:
            return f"{name or 'an activation that is not named'} clamped at {limit:g}", []
    return name, []


def _limit(fields: Fields, key: str, index: int | None) -> tuple[float | None, str]:
    """The clamp of a layer: a number, or a list of one for each layer in which 0 and null are none."""
    value = fields.value(key)
    if not isinstance(value, list):
        return fields.number(key), ""
    for one in value:
        if one is not None and type(one) not in (int, float):
            raise fields.fault(key, one, "a number, or null, for each layer")
    if len({one or 0 for one in value}) <= 1:
        return (value[0] if value else None), ""
    if index is None or index >= len(value):
        return None, f"{key} has numbers for layers 0 to {len(value) - 1}, and this layer is none of them"
    return value[index], ""


def _given(fields: Fields, types: ModelTypes) -> Iterator[tuple[str, str]]:
    """Keys that say that the experts compute something else, and what."""
    return ((key, text) for key, text in types.keys.differs.items() if fields.value(key) not in NEUTRAL)


def _unread(fields: Fields, types: ModelTypes, family: Family | None, activation: str | None) -> list[str]:
    """Keys that could change the arithmetic, which nobody reads and which say something."""
    keys = types.keys
    read = {*keys.activation, *keys.clamp, *keys.router_weight, *keys.width, *keys.differs}
    read |= {family.activation} if family is not None else set()
    if family is not None and family.differs:
        return []  # it is told already that the experts compute something else
    found = []
    for place, key, value in _pairs(fields):
        silent = (
            value in NEUTRAL or value == activation or (isinstance(value, list) and all(v in NEUTRAL for v in value))
        )
        if key not in read and not silent and types.suspicious(key):
            found.append(f"{place}{key} = {SHORT.repr(value)} is read by nobody, and could change what experts compute")
    return found


def _pairs(fields: Fields) -> Iterator[tuple[str, str, Any]]:
    """(place, key, value) of the table that declares the experts, of tables in it that concern them, and around it."""
    table: Fields | None = fields
    inside = [(f"{fields.path}{name}.", values) for name, values in fields.values.items() if _concerns(name, values)]
    for path, values in inside:
        yield from ((path, key, value) for key, value in values.items() if not isinstance(value, dict))
    seen: set[str] = set()
    while table is not None:
        for key, value in table.values.items():
            if key not in seen and not isinstance(value, dict):
                seen.add(key)
                yield table.path, key, value
        table = table.behind


def _concerns(name: str, values: object) -> bool:
    return isinstance(values, Mapping) and any(word in name.lower() for word in INNER)
