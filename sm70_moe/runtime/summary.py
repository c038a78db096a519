"""Summary: what a service has decided so far, in counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sm70_moe.plan.plan import Plan
from sm70_moe.plan.speed import slow_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """Over all layers so far: how many each feature was admitted for, and how many can run at all.

    `native` have a native route for every token count; `slow` says for which the others take the portable one,
    and how many they are.
    """

    layers: int
    supported: int
    admitted: dict[str, int]
    native: int = 0
    slow: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}/{self.layers}" for name, count in self.admitted.items())
        return f"supported {self.supported}/{self.layers}; {self.speed}; admitted {counts or 'nothing'}"

    @property
    def speed(self) -> str:
        """ "native 48/48", "portable 48/48 (slow: 9+ tokens)", or both."""
        native = [f"native {self.native}/{self.layers}"] if self.native or not self.slow else []
        slow = [f"portable {count}/{self.layers} (slow: {text})" for text, count in self.slow.items()]
        return ", ".join([*native, *slow])


def speeds(plans: Iterable[Plan]) -> tuple[int, dict[str, int]]:
    """How many supported layers are native for every token count, and how many are slow for which."""
    slow: dict[str, int] = {}
    native = 0
    for plan in plans:
        text = slow_tokens(plan) if plan.supported else None
        native += text == ""
        if text:
            slow[text] = slow.get(text, 0) + 1
    return native, slow
