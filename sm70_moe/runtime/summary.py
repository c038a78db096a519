"""Summary: what a service has decided so far, in counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Over all layers so far: how many each feature was admitted for, and how many can run at all."""

    layers: int
    supported: int
    admitted: dict[str, int]

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}/{self.layers}" for name, count in self.admitted.items())
        return f"supported {self.supported}/{self.layers}; admitted {counts or 'nothing'}"
