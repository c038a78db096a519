"""Summary: what a service has decided so far, in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Plain
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.speed import slow_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """Over all layers so far: how many each feature was admitted for, and how many can run at all.

    `native` have a native route for every token count; `slow` says for which the others take the portable one,
    and how many they are; `gpu`, whether any layer is on one. `left` stay with the engine, which runs them itself, by
    why; they count as neither.
    """

    layers: int
    supported: int
    admitted: dict[str, int]
    native: int = 0
    slow: dict[str, int] = field(default_factory=dict)
    gpu: bool = False
    left: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plans: Iterable[Plan], refused: Iterable[Admission], left: Mapping[str, str] = MappingProxyType({})
    ) -> Summary:
        """Of all layers that were decided; refused ones run nowhere. `left` has the engine's own, and why they are."""
        planned = list(plans)
        admissions = [*(plan.admission for plan in planned), *refused]
        counts: dict[str, int] = {}
        for decision in (decision for admission in admissions for decision in admission.decisions):
            counts[decision.feature] = counts.get(decision.feature, 0) + decision.admitted
        supported = sum(a.supported and not a.refused for a in admissions)
        devices = [admission.device for admission in admissions]
        gpu = any(device is not None and device.architecture.startswith("sm_") for device in devices)
        ours = [plan for plan in planned if plan.layer not in left]
        return cls(len(admissions), supported, counts, *speeds(ours), gpu, dict(Counter(left.values())))

    @property
    def level(self) -> str:
        """Of the event: slow calls where there is a GPU are worth a warning."""
        return "warning" if self.slow and self.gpu else "info"

    def record(self) -> dict[str, Plain]:
        """Plain JSON types."""
        return {
            "layers": self.layers,
            "supported": self.supported,
            "native": self.native,
            "slow": self.slow,
            "left": self.left,
            "admitted": {name: f"{count}/{self.layers}" for name, count in self.admitted.items()},
            "text": str(self),
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}/{self.layers}" for name, count in self.admitted.items())
        return f"supported {self.supported}/{self.layers}; {self.speed}; admitted {counts or 'nothing'}"

    @property
    def speed(self) -> str:
        """ "native 48/48", "portable 48/48 (slow: 9+ tokens)", what was left to the engine and why, or several."""
        native = [f"native {self.native}/{self.layers}"] if self.native or not (self.slow or self.left) else []
        slow = [f"portable {count}/{self.layers} (slow: {text})" for text, count in self.slow.items()]
        left = [f"left to the engine {count}/{self.layers} ({why})" for why, count in self.left.items()]
        return ", ".join([*native, *slow, *left])


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
