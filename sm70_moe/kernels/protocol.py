"""What runs a layer: the protocol that every backend keeps.

A backend is small and imports no torch until `prepare` or `run`: admission asks it what it can do
on machines that have no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sm70_moe.decision import Finding
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.capability import Capability
from sm70_moe.layout import BankLayout, BankShape

if TYPE_CHECKING:
    import torch

    from sm70_moe.banks.banks import Banks
    from sm70_moe.kernels.call import Call
    from sm70_moe.numbers.codes import WeightSource


class Workspace(Protocol):
    """Working memory of a device, which its layers share: calls of a device follow one another."""

    def lend(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes, uint8, 256-byte aligned, whatever stands in them; until the call has run."""


@runtime_checkable
class Backend(Protocol):
    """Runs routes of one kind.

    `options` are the option features that it honours; `native` says that it needs machine code for a
    GPU: the package's own build for a built-in backend, its own for a plug-in.
    """

    @property
    def name(self) -> str: ...

    @property
    def native(self) -> bool: ...

    @property
    def options(self) -> Set[str]: ...

    def can(self, architecture: str | None) -> Capability | None:
        """What it runs on "sm_70", "cpu", ...; on any of them for None. None: it has no kernels there."""

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        """What this backend itself demands of a layer, beyond the policy's contract and what it `can`."""

    def workspace(self, shape: BankShape, top_k: int, tokens: int) -> int:
        """Bytes of working memory that one call of `tokens` rows takes at most, on every path and device."""

    def prepare(self, source: WeightSource, layout: BankLayout, shape: BankShape, device: str) -> Banks:
        """Read this rank's weights into banks of that layout."""

    def run(self, banks: Banks, call: Call, space: Workspace | None = None) -> None:
        """Write the layer's output for one call; working memory is lent by `space`, or allocated without one."""


@runtime_checkable
class Configurable(Protocol):
    """A backend that runs in another way for layers that have some of its `options`."""

    def with_options(self, names: Set[str]) -> Backend:
        """The backend for a layer for which these options, and no others, were admitted."""


@runtime_checkable
class SelfTested(Protocol):
    """A native plug-in that can try itself on a device."""

    def self_test(self, device: str) -> str:
        """The known-answer call on "cuda:N": "" is right, other text says what went wrong."""


@runtime_checkable
class Readied(Protocol):
    """A backend that loads and plans a layer's calls in advance."""

    def ready(self, banks: Banks, top_k: int) -> None:
        """Everything that a first call would load or allocate, which a graph could not capture."""


@runtime_checkable
class Versioned(Protocol):
    """A backend that launches other kernels for other numbers of tokens."""

    def version(self, banks: Banks, top_k: int, tokens: int) -> object:
        """Equal for calls that launch the same kernels: a proof tries each once."""


@runtime_checkable
class Tunable(Protocol):
    """A backend that can launch a call in several ways ("tactics"), all with the same bits."""

    def tactics(self, banks: Banks, top_k: int, tokens: int, dtype: str) -> tuple[str, ...]:
        """What calls of up to `tokens` may be run by, the one that is no choice first."""

    def timed(self, banks: Banks, call: Call, tactic: str, space: Workspace | None) -> float:
        """Microseconds of a call on its device, measured now; its output is written.

        Raises BackendError for a tactic that cannot be launched.
        """

    def take(self, banks: Banks, top_k: int, chosen: Mapping[int, str]) -> None:
        """Run the layer's calls by these tactics from now on: by the largest number of tokens of each bucket."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A plug-in that does not load; `error` is the text of what it raised."""

    name: str
    error: str
