"""Sums of matrix products in real FP32: torch may be told to take TF32 or BF16 for FP32 products instead, and to
add parts of FP16 products in FP16 (which it does unless it is told not to).

Those switches belong to the process, not to a thread. This file is the only one that touches them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

FULL = ("none", "ieee", "highest")
"""Values of torch's switches that mean FP32; "none" is what a fresh process has."""

HALVES = ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
"""Switches of CUDA's FP16 products that must be off; the second is there from torch 2.7 on."""


class Switches:
    """Holds torch's switches at full precision while anyone needs it.

    Thread-safe among its own users: the first one in saves and sets the switches, the last one out
    restores them. Where they already ask for full precision nothing is touched. A product that
    another thread starts meanwhile also runs in full FP32: slower, never less exact. A thread that
    turns the switches down *during* a call can still spoil it: torch offers no lock against that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._saved: tuple[str, ...] | None = None
        self._halves: dict[str, bool] = {}

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._saved is None and any(value not in FULL for value in read_switches()):
                self._saved = read_switches()
                write_switches(("ieee",) * len(self._saved))
            if self._users == 1:
                self._halves = {name: True for name in HALVES if getattr(torch.backends.cuda.matmul, name, False)}
                write_halves(dict.fromkeys(self._halves, False))

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._saved is not None:
                write_switches(self._saved)
                self._saved = None
            write_halves(self._halves)
            self._halves = {}


def places() -> tuple[Any, ...]:
    """Where torch (2.9 and later) keeps a switch: one for CUDA, one for the CPU library."""
    found = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return found if all(hasattr(place, "fp32_precision") for place in found) else ()


def read_switches() -> tuple[str, ...]:
    """Effective precision of FP32 matrix products in each place; before torch 2.9, of all of them."""
    if not places():
        return (torch.get_float32_matmul_precision(),)
    return tuple(place.fp32_precision for place in places())


def write_switches(values: tuple[str, ...]) -> None:
    if not places():
        torch.set_float32_matmul_precision(values[0] if values[0] != "ieee" else "highest")
    for place, value in zip(places(), values, strict=False):
        place.fp32_precision = value


def write_halves(values: Mapping[str, bool]) -> None:
    """Switches of FP16 products by name; whether a sum may be split over blocks stays as it is."""
    place = torch.backends.cuda.matmul
    for name, value in values.items():
        split = getattr(place, f"{name}_split_k", None)
        setattr(place, name, value if split is None else (value, split))


_SWITCHES = Switches()
"""The switches are global in torch, so there is one holder of them in the process."""


@contextmanager
def full_fp32(device: str) -> Iterator[None]:
    """FP32 and FP16 products are summed in FP32 on `device` ("cpu", "cuda"); autocast is off, no gradient recorded."""
    _SWITCHES.enter()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        _SWITCHES.leave()
