"""Build hook: compiles the native kernels into the wheel. Needs no GPU and no CUDA toolkit.

SM70_MOE_BUILD_KERNELS: `1` builds them, `0` does not; unset builds them for wheels and not for
editable installations. Without them the package is complete, and every layer takes a portable route.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "SM70_MOE_BUILD_KERNELS"
FOLDER = "sm70_moe/kernels/cubins"


class KernelBuildHook(BuildHookInterface):
    """Puts the cubins and their record into the wheel; the rest of the wheel is hatchling's."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """The pinned compiler, asked for only if it will be used: it is 90 MB."""
        return list(self.kernels().nvrtc.REQUIREMENTS) if self.wanted("standard") else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not self.wanted(version):
            return
        build = self.kernels()
        root = Path(self.root)
        # an editable installation loads from the checkout itself
        out = root / FOLDER if version == "editable" else root / "build" / "cubins"
        made = build.build(out, build.shipped_scope(), cache=root / "build" / "kernels", progress=self.tell)
        self.app.display_info(f"{len(made.images)} cubins, build {made.id[:16]}")
        if version != "editable":
            build_data["force_include"][str(out)] = FOLDER

    def wanted(self, version: str) -> bool:
        value = os.environ.get(VARIABLE)
        if value not in (None, "0", "1"):
            raise ValueError(f"{VARIABLE}={value!r}: accepted are 0 and 1, or leave it unset")
        return value == "1" or (value is None and version != "editable")

    def kernels(self) -> Any:
        """`sm70_moe.kernels.build` of this source tree; it needs nothing but the standard library."""
        if self.root not in sys.path:
            sys.path.insert(0, self.root)
        from sm70_moe.kernels import build

        return build

    def tell(self, done: int, total: int) -> None:
        if done == total or done % 20 == 0:
            self.app.display_info(f"compiled {done} of {total} cubins")
