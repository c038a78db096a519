"""What is known to work on a V100: which torch builds still hold sm_70 machine code.

Read off PyTorch's own support matrix (RELEASE.md of pytorch/pytorch, and its announcement "Dropping
Volta support from CUDA-12.8 binaries for release 2.11", January 2026). CUDA 13 compilers cannot
target sm_70 at all, whatever is built with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Combination:
    """One line of torch wheels by the CUDA version that they are built with."""

    torch: str
    cuda: str
    volta: bool
    note: str = ""


COMBINATIONS = (
    Combination("2.8 and later", "12.6", True, "the only wheels with sm_70 from 2.11 on"),
    Combination("2.8 to 2.10", "12.8", True, "sm_70 left these wheels in 2.11"),
    Combination("2.11 and later", "12.8", False, "starts at sm_75"),
    Combination("any", "13.x", False, "the compiler cannot target sm_70"),
)
