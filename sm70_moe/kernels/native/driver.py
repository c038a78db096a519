"""What is asked of CUDA, as a protocol: `devices.CudaDriver` is the real one, tests bring their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sm70_moe.kernels.native.residency import Residency

if TYPE_CHECKING:
    from numpy.typing import NDArray

Fire = Callable[[int, int], None]
"""Launches one kernel: (stream, address of the table of its parameters). Raises LaunchRefused."""


@dataclass(frozen=True, slots=True)
class Config:
    """A launch as the driver wants it: blocks, threads, dynamic shared bytes, attributes."""

    grid: tuple[int, int, int]
    threads: int
    shared: int
    dependent: bool
    cooperative: bool


class Arena(Protocol):
    """Device memory that is given back all at once."""

    def put(self, array: NDArray[Any]) -> int:
        """Copy an array to the device; its address."""

    def get(self, address: int, array: NDArray[Any]) -> None:
        """Wait for the device, and copy into the array."""


class Driver(Protocol):
    """What is asked of CUDA; `devices.CudaDriver` is the real one."""

    def architecture(self, device: int) -> str:
        """ "sm_70" for compute capability 7.0."""

    def load(self, device: int, image: bytes, kernel: str) -> object:
        """A handle of one kernel of a cubin, loaded on the device."""

    def threads(self, device: int, kernel: object) -> int:
        """Threads a block that a loaded kernel's `__launch_bounds__` allow."""

    def residency(self, device: int, kernel: object, threads: int, shared: int) -> Residency:
        """How many such blocks of a loaded kernel the device holds at once."""

    def prepare(self, device: int, kernel: object, config: Config) -> Fire:
        """What launches a loaded kernel with this configuration."""

    def arena(self, device: int) -> AbstractContextManager[Arena]:
        """Memory for a self-test; the device is current inside."""
