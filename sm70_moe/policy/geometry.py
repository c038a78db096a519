"""Rules about numbers: sizes that the groups and the banks can hold, call shapes that fit the sizes."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from sm70_moe.grouping import SMALLEST_GROUP
from sm70_moe.layout import ORDERS, Order
from sm70_moe.policy.contract import Contract
from sm70_moe.policy.draft import Draft
from sm70_moe.policy.fault import Fault
from sm70_moe.policy.lines import KeyPath
from sm70_moe.policy.route import Route
from sm70_moe.policy.wording import shown

WEIGHTS = ("contract", "weights")


def geometry_faults(draft: Draft) -> Iterator[Fault]:
    """Faults of the contract's sizes, and of call conditions against them."""
    for order in dict.fromkeys(route.order for _, route in draft.routes):
        if order is not None and order in ORDERS:  # a plug-in knows the sizes of its own
            yield from banks(draft.contract, ORDERS[order])
    yield from groups(draft.contract)
    yield from experts(draft.contract)
    for place, route in draft.routes:
        yield from call(draft.contract, route, ("route", place, "call"))


def multiple(where: KeyPath, value: int | None, divisor: int | None, why: str) -> Iterator[Fault]:
    """`value` must be a multiple of `divisor`, where both are given."""
    if value is not None and divisor is not None and value % divisor:
        yield Fault(where, f"{value} ({value} % {divisor} = {value % divisor})", f"a multiple of {divisor}: {why}")


def banks(contract: Contract, order: Order) -> Iterator[Fault]:
    """W13 is (hidden, 2 x intermediate), W2 (intermediate, hidden): K in whole blocks, N in whole tiles."""
    why = f"{order.name} banks have {order.rows} rows in a block and {order.tile} columns in a tile"
    yield from multiple(("contract", "hidden"), contract.hidden, lcm(order.rows, order.tile), why)
    yield from multiple(("contract", "intermediate"), contract.intermediate, lcm(order.rows, order.tile // 2), why)


def groups(contract: Contract) -> Iterator[Fault]:
    """Groups divide K of both matrices: the files' groups the whole one, the banks' groups a rank's."""
    checkpoint, prepared = contract.weights.checkpoint_group, contract.weights.prepared_group
    hidden, intermediate = ("contract", "hidden"), ("contract", "intermediate")
    yield from multiple(hidden, contract.hidden, checkpoint, "checkpoint_group divides K of W13")
    yield from multiple(intermediate, contract.whole_intermediate, checkpoint, "checkpoint_group divides K of W2")
    if prepared != checkpoint:
        yield from multiple(hidden, contract.hidden, prepared, "prepared_group divides K of W13")
    yield from multiple(intermediate, contract.intermediate, prepared, "prepared_group divides a rank's K of W2")
    where = (*WEIGHTS, "prepared_group")
    if prepared is not None and prepared < SMALLEST_GROUP:
        yield Fault(where, str(prepared), f"at least {SMALLEST_GROUP}")
    if prepared is not None and checkpoint is not None and checkpoint % prepared:
        yield Fault(where, str(prepared), f"checkpoint_group {checkpoint} or a divisor of it")


def experts(contract: Contract) -> Iterator[Fault]:
    where = ("contract", "experts")
    yield from multiple(where, contract.experts, contract.expert_parallel, "expert_parallel ranks hold equally many")
    if contract.top_k is not None and contract.experts is not None and contract.top_k > contract.experts:
        yield Fault(("contract", "top_k"), str(contract.top_k), f"at most experts, {contract.experts}")


def call(contract: Contract, route: Route, where: KeyPath) -> Iterator[Fault]:
    """Call conditions that no call of this contract and these tokens can meet."""
    if route.call is None:
        return
    if contract.activations is not None and route.call.x not in (None, contract.activations):
        yield Fault((*where, "x"), shown(route.call.x), f"{shown(contract.activations)} as contract.activations")
    tokens: int | None = None
    for key, name, width in (
        ("x_shape", "hidden", contract.hidden),
        ("ids_shape", "top_k", contract.top_k),
        ("weights_shape", "top_k", contract.top_k),
    ):
        shape = getattr(route.call, key)
        if shape is None:
            continue
        if width is not None and shape[1] != width:
            yield Fault((*where, key, 1), str(shape[1]), f"{width} as contract.{name}")
        if shape[0] not in route.tokens:
            yield Fault((*where, key, 0), str(shape[0]), f"{route.tokens} tokens as the route")
        if tokens is not None and shape[0] != tokens:
            yield Fault((*where, key, 0), str(shape[0]), f"{tokens} tokens as the other shapes")
        tokens = shape[0] if tokens is None else tokens
