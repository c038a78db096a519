"""Machine: everything that admission may know about where it runs.

A plain value, so that a test or `explain --capability` can make up any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sm70_moe.decision import Plain
from sm70_moe.living import LivingValue
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import Device

if TYPE_CHECKING:
    from sm70_moe.kernels.protocol import Backend, Broken


@dataclass(frozen=True, slots=True)
class Machine(LivingValue):
    """Everything that admission may know about where it runs.

    `build` is None where there is none; `build_looked_up` is False where nobody looked, because
    every flag of a native route is 0. `torch` is the installed version, None without torch.
    `plugin_tests` are the known-answer calls of native plug-ins by (device, backend), as in `Build`.
    """

    devices: tuple[Device, ...]
    backends: Mapping[str, Backend | Broken]
    build: Build | None = None
    build_looked_up: bool = True
    torch: str | None = None
    plugin_tests: Mapping[tuple[str, str], str] = field(default_factory=dict, compare=False)

    def device(self, name: str) -> Device | None:
        """The device of that name; "cuda" is "cuda:0"."""
        wanted = "cuda:0" if name == "cuda" else name
        return next((d for d in self.devices if d.name == wanted), None)

    def record(self) -> dict[str, Plain]:
        return {
            "devices": [{"name": d.name, "architecture": d.architecture, "model": d.model} for d in self.devices],
            "backends": sorted(self.backends),
            "build": self.build.id if self.build else None,
            "torch": self.torch,
        }

    @property
    def fingerprint(self) -> str:
        """Digest of the record: equal on machines that admission cannot tell apart."""
        return hashlib.sha256(repr(self.record()).encode()).hexdigest()[:16]
