"""Case: what a call looks like to the one who plans its launches."""

from __future__ import annotations

from dataclasses import dataclass

from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.layout import BankLayout, BankShape

RULE = "rule"
"""The tactic that is no choice: batches are cut as their sizes say (batches.py)."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a call looks like to the one who plans it.

    `dependent`: this device and the settings allow a kernel to start before the one in front ends. `dtype` is that
    of the activations, `tactic` how a batch is cut.
    """

    shape: BankShape
    layout: BankLayout
    top_k: int
    tokens: int
    architecture: str
    dependent: bool
    dtype: str = "float16"
    tactic: str = RULE

    @property
    def geometry(self) -> Geometry:
        """The sizes that choose the kernels' versions."""
        shape = self.shape
        return Geometry(shape.hidden, shape.intermediate, shape.experts, self.top_k, self.layout.group)
