"""Which kernels each native backend launches for a call: the one place where grids are written.

A function per backend takes a `Case` and gives its steps. It runs once for each layer and number of
tokens, never on the hot path. docs/kernels.md names the arguments that every kernel may take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sm70_moe.kernels.launch import Step
from sm70_moe.layout import BankLayout, BankShape


@dataclass(frozen=True, slots=True)
class Case:
    """What a call looks like to the one who plans it.

    `dependent`: this device and the settings allow a kernel to start before the one in front ends.
    """

    shape: BankShape
    layout: BankLayout
    top_k: int
    tokens: int
    architecture: str
    dependent: bool


@dataclass(frozen=True, slots=True)
class Route:
    """How a backend runs calls of `first` to `last` tokens.

    `sources` must all have images for a device before the backend runs on it; `orders` are the bank
    orders that its kernels read, `groups` the prepared groups and `metadata` the kinds of metadata.
    `interleaved` are the ways in which W13's gate and up columns may stand. `scratch` counts resident
    bytes of a layer, beyond the activations between W13 and W2.
    """

    steps: Callable[[Case], tuple[Step, ...]]
    sources: tuple[str, ...]
    first: int
    last: int
    orders: frozenset[str] = frozenset({"tile32x8"})
    groups: tuple[int, ...] = (32, 64, 128)
    metadata: tuple[str, ...] = ("4-byte", "3-byte")
    interleaved: tuple[bool, ...] = (True,)
    scratch: int = 0


CALL = ("x", "ids", "weights", "out", "intermediate")
"""Arguments that every call gives anew: addresses."""

PLANES = tuple(f"{bank}_{plane}" for bank in ("w13", "w2") for plane in ("words", "metadata", "scales", "zeros"))
"""Arguments that are addresses of the banks' planes."""


def numbers(case: Case) -> dict[str, float]:
    """Arguments that are sizes."""
    return {
        "tokens": case.tokens,
        "top_k": case.top_k,
        "hidden": case.shape.hidden,
        "inner": case.shape.intermediate,
        "experts": case.shape.experts,
        "group": case.layout.group,
    }


def bank_arguments(planes: Mapping[str, int]) -> dict[str, float]:
    """Addresses of the planes by argument name; 0 for those that the layout does not have."""
    return {name: planes.get(name, 0) for name in PLANES}


STEPS: Mapping[str, Route] = {}
"""Backend -> how it runs. A native backend without a row has no kernels yet, and admission says so."""
