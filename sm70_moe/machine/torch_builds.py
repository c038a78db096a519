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


@dataclass(frozen=True, slots=True)
class HostBuild:
    """An engine with the torch that its own requirements name; `volta` where some wheel of that torch holds sm_70."""

    engine: str
    torch: str
    cuda: str
    volta: bool
    note: str = ""


HOSTS = (
    HostBuild("1Cat-vLLM", "2.10", "12.8", True, "made for V100s"),
    HostBuild("vLLM 0.19", "2.10", "12.8", True, "its AWQ linears ask for 7.5; experts and plain linears do not"),
    HostBuild("vLLM 0.20 to 0.26", "2.11", "12.6", True, "CUDA 12.6 wheels of torch; vLLM's own code may lack sm_70"),
    HostBuild("vLLM 0.27 to 0.30", "2.13", "12.6", True, "the same"),
    HostBuild("vLLM 0.31 and later", "2.13", "any", False, "documented from compute capability 7.5 on"),
    HostBuild("transformers 5.15 to 5.24", "2.8 to 2.10", "12.6 or 12.8", True),
    HostBuild("transformers 5.15 to 5.24", "2.11 and later", "12.6", True),
)
"""Torch as the wheels of vLLM ask for it in their metadata; which of these were run is in docs/vllm.md."""
