"""What all arms of one kind of metadata share: the admitted layer, its banks, and how kernels get on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sm70_moe.banks.banks import Bank, Banks, whole
from sm70_moe.benchmark.traffic import stand_in
from sm70_moe.benchmark.weights import random_banks, reference_of
from sm70_moe.errors import BackendError
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.launch import Launcher
from sm70_moe.layout import METADATA, BankLayout, BankShape
from sm70_moe.plan.plan import Plan
from sm70_moe.reference.arithmetic import Reference
from sm70_moe.runtime.arena import Arena
from sm70_moe.timings import W2, W13

WORKSPACE = 16 << 20
"""Bytes that calls share, as in an engine; a larger call takes what it needs while it is captured."""


@dataclass(slots=True)
class Setup:
    """One rank's layer on a device, several times over.

    `launcher` has the kernels of the measurement itself (read-only, separating, empty); None where there
    are none, and then `no_launcher` says why. `stream` gives the handle of torch's current stream.
    """

    plan: Plan
    layout: BankLayout
    shape: BankShape
    top_k: int
    device: str
    banks: tuple[Banks, ...]
    launcher: Launcher | None
    no_launcher: str
    stream: Callable[[], int]
    space: Arena
    _stand_ins: tuple[dict[str, torch.Tensor], ...] = ()
    _references: dict[int, Reference] = field(default_factory=dict)
    _natives: dict[tuple[str, str, str], NativeBackend] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        plan: Plan,
        layout: BankLayout,
        shape: BankShape,
        device: str,
        banks: int,
        seed: int,
        launcher: Launcher | str,
        stream: Callable[[], int],
    ) -> Setup:
        """Allocate and fill. `launcher` is text where there is none: why."""
        if not layout.batched:
            raise BackendError(f"banks {layout.tag!r}: a layer is measured with all its experts in one bank")
        made = tuple(random_banks(layout, shape, device, seed + n) for n in range(banks))
        found, why = (None, launcher) if isinstance(launcher, str) else (launcher, "")
        top_k = plan.admission.facts.top_k or 1
        others = tuple(stand_ins(layout, shape, device) for _ in range(banks if found else 0))
        space = Arena(device)
        space.reserve(WORKSPACE)
        return cls(plan, layout, shape, top_k, device, made, found, why, stream, space, others)

    def bank(self, layer: int) -> Banks:
        return self.banks[layer % len(self.banks)]

    def groups(self, layer: int, part: str) -> int:
        """Address of metadata for the read-only kernels."""
        if self._stand_ins and part in self._stand_ins[0]:
            return self._stand_ins[layer % len(self.banks)][part].data_ptr()
        bank = self.bank(layer)
        return plane_address(bank.w13 if part == W13 else bank.w2, METADATA)

    def words(self, layer: int, part: str) -> int:
        bank = self.bank(layer)
        return plane_address(bank.w13 if part == W13 else bank.w2, "words")

    def reference(self, layer: int) -> Reference:
        """The FP64 reference of a layer's bank."""
        place = layer % len(self.banks)
        return self._references.setdefault(place, reference_of(self.banks[place]))

    def native(self, arm: str, launch: str, name: str, make: Callable[[], NativeBackend]) -> NativeBackend:
        """A backend for an arm, made once and ready for every bank: nothing is allocated in a capture."""
        key = (arm, launch, name)
        if key not in self._natives:
            made = make()
            for banks in self.banks:
                made.ready(banks, self.top_k)
            self._natives[key] = made
        return self._natives[key]


def stand_ins(layout: BankLayout, shape: BankShape, device: str) -> dict[str, torch.Tensor]:
    """Random bytes where the metadata lies in two planes; see `traffic.stand_in`."""
    sizes = {part: stand_in(layout, shape, part) for part in (W13, W2)}
    return {
        part: torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for part, size in sizes.items() if size
    }


def plane_address(bank: Bank, name: str) -> int:
    """Address of a plane of a batched bank."""
    return whole(bank.planes[name]).data_ptr()
