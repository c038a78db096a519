"""What this machine has: devices, torch, the native build, the backends.

`Machine` is a plain value, so that a test or `explain --capability` can make up any machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING

from sm70_moe.decision import Plain

if TYPE_CHECKING:
    from sm70_moe.kernels import Backend, Broken


@dataclass(frozen=True, slots=True)
class Device:
    """One place where a layer can run. `capability` is None for a CPU; `memory` is in bytes."""

    name: str
    capability: tuple[int, int] | None
    model: str = ""
    memory: int | None = None

    @property
    def architecture(self) -> str:
        """ "sm_70" for compute capability 7.0; "cpu" for a CPU."""
        if self.capability is None:
            return "cpu"
        major, minor = self.capability
        return f"sm_{major}{minor}"


CPU = Device("cpu", None, "CPU")


@dataclass(frozen=True, slots=True)
class Build:
    """The native kernels that are installed.

    `expected` is the build id that this package's sources would give: another `id` is a stale
    build. `images` are the architectures it holds machine code for. `self_tests` maps
    (device, backend) to "" for a known-answer call that came out right, else to what went wrong.
    """

    id: str
    expected: str
    images: frozenset[str]
    self_tests: Mapping[tuple[str, str], str] = field(default_factory=dict)
