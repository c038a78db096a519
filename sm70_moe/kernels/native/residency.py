"""How much of a kernel's grid a device holds at once: what a barrier of the whole grid rests on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """Blocks of one kernel that a device holds at once.

    `cooperative`: it launches grids all of whose blocks are resident. `each` are blocks of one of its
    `multiprocessors`, as registers, threads and shared memory allow.
    """

    cooperative: bool
    multiprocessors: int
    each: int

    @property
    def blocks(self) -> int:
        """All that are resident together."""
        return self.multiprocessors * self.each
