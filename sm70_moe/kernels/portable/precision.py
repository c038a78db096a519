"""Real FP32 matrix products: torch may be told to take TF32 or BF16 for them instead.

Those switches belong to the process, not to a thread. This file is the only one that touches them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FULL = ("none", "ieee", "highest")
"""Values of torch's switches that mean FP32; "none" is what a fresh process has."""


class Switches:
    """Holds torch's FP32 switches at full precision while anyone needs it.

    Thread-safe among its own users: the first one in saves and sets the switches, the last one out
    restores them. Where they already ask for full precision nothing is touched. A product that
    another thread starts meanwhile also runs in full FP32: slower, never less exact. A thread that
    turns the switches down *during* a call can still spoil it: torch offers no lock against that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._saved: tuple[str, ...] | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._saved is None and any(value not in FULL for value in read_switches()):
                self._saved = read_switches()
                write_switches(("ieee",) * len(self._saved))

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._saved is not None:
                write_switches(self._saved)
                self._saved = None


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


_SWITCHES = Switches()
"""The switches are global in torch, so there is one holder of them in the process."""


@contextmanager
def full_fp32(device: str) -> Iterator[None]:
    """FP32 products are FP32 on `device` ("cpu", "cuda"), autocast is off, no gradient is recorded."""
    _SWITCHES.enter()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        _SWITCHES.leave()
