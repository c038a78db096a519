"""Every order of prepared banks, by name: another order is one file, its geometry in `layout`, and a row here."""

from __future__ import annotations

from sm70_moe.banks import octets, tiles
from sm70_moe.banks.packing import Packing
from sm70_moe.errors import BackendError

PACKINGS: dict[str, Packing] = {packing.order.name: packing for packing in (tiles.PACKING, octets.PACKING)}


def packing_of(order: str) -> Packing:
    """The packing of an order; raises BackendError that lists the known ones."""
    if order not in PACKINGS:
        raise BackendError(f"bank order {order!r}; accepted are {', '.join(map(repr, PACKINGS))}")
    return PACKINGS[order]
