"""How a run measures: everything that somebody else must know to repeat it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sm70_moe.decision import Plain
from sm70_moe.errors import SettingsError
from sm70_moe.layout import Metadata

LEAST_SAMPLES, MOST_SAMPLES = 7, 10_000
MOST_LAYERS = 1024
"""A graph of more would take the host minutes to capture, and shows nothing new."""

MOST_TOKENS = 64
"""A block of the separating kernel writes an id a thread: 64 tokens with 16 slots each."""

UNIFORM, OVERLAPPING, HALF_SHARED = ROUTINGS = ("uniform", "overlapping", "half-shared")
"""Each token takes experts of its own; all take the same; half of them are shared. `routing.RULES` draws them."""

KINDS = tuple(kind.value for kind in Metadata)


@dataclass(frozen=True, slots=True)
class Protocol:
    """What is asked for. `banks` is None for as many as fit.

    `layers` calls stand in a CUDA graph. A sample is the mean of `replays` replays; the samples are
    spread over `captures` graphs, each captured anew, since a graph keeps what it got at its capture.
    `seconds` after the start nothing new is begun: making weights and kernels counts.
    """

    tokens: tuple[int, ...] = (1, 2, 4, 8)
    metadata: tuple[str, ...] = ("4-byte",)
    routings: tuple[str, ...] = (UNIFORM, OVERLAPPING)
    layers: int = 48
    banks: int | None = None
    samples: int = 9
    captures: int = 3
    replays: int = 8
    warm: int = 3
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        if any(not 1 <= count <= MOST_TOKENS for count in self.tokens):
            raise SettingsError(f"tokens {self.tokens}: accepted are numbers from 1 to {MOST_TOKENS}")
        for name, values, accepted in (("metadata", self.metadata, KINDS), ("routing", self.routings, ROUTINGS)):
            if odd := [value for value in values if value not in accepted]:
                raise SettingsError(f"{name} {odd[0]!r}: accepted are {', '.join(accepted)}")
        lists: dict[str, tuple[int | str, ...]] = {
            "tokens": self.tokens,
            "metadata": self.metadata,
            "routing": self.routings,
        }
        for name, items in lists.items():
            if twice := [item for item in items if items.count(item) > 1]:
                raise SettingsError(f"{name} {twice[0]!r}: given more than once; accepted is each of them once")
        if not LEAST_SAMPLES <= self.samples <= MOST_SAMPLES:
            raise SettingsError(
                f"samples {self.samples}: accepted are at least {LEAST_SAMPLES}, at most {MOST_SAMPLES}"
            )
        if not 1 <= self.layers <= MOST_LAYERS:
            raise SettingsError(f"layers {self.layers}: accepted are numbers from 1 to {MOST_LAYERS}")
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"seconds {self.seconds}: accepted are positive numbers")
        if self.banks is not None and self.banks < 2:
            raise SettingsError(f"banks {self.banks}: accepted are at least 2, or a cache is measured")

    def record(self) -> dict[str, Plain]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
