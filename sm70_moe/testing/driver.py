"""A driver without a GPU: what is launched can be looked at, or computed by a function of the test."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm70_moe.kernels.native.driver import Config, Fire
from sm70_moe.kernels.native.refusal import LaunchRefused
from sm70_moe.kernels.native.residency import Residency

if TYPE_CHECKING:
    from numpy.typing import NDArray

TYPES: Mapping[str, Any] = {"ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
"""Kind of a manifest's argument -> how it lies in memory."""


V100 = Residency(cooperative=True, multiprocessors=80, each=5)
"""A V100 with blocks of 192 threads and 64 registers."""


def number_at(kind: str, address: int) -> float:
    """The number of that kind at an address of this process."""
    number: float = TYPES[kind].from_address(address).value
    return number


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch as the driver saw it; `arguments` in the kernel's order."""

    kernel: str
    config: Config
    stream: int
    arguments: tuple[float, ...]


@dataclass(slots=True)
class FakeDriver:
    """Keeps the `Driver` protocol of `sm70_moe.kernels.native.launch`.

    `kinds` gives each kernel's arguments ("ptr", "i32", ...). `compute` is called for every launch,
    with the memory by address. `bound` is every kernel's launch bound, `holds` what the device holds
    of any. `refuses` is what the driver
    says to every launch, if it is not "".
    """

    kinds: Mapping[str, Sequence[str]]
    compute: Callable[[Launched, Mapping[int, NDArray[Any]]], None] = lambda launched, memory: None
    refuses: str = ""
    name: str = "sm_70"
    bound: int = 256
    holds: Residency = V100
    loaded: list[tuple[int, bytes, str]] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    memory: dict[int, NDArray[Any]] = field(default_factory=dict)

    def architecture(self, device: int) -> str:
        return self.name

    def load(self, device: int, image: bytes, kernel: str) -> object:
        self.loaded.append((device, image, kernel))
        return kernel

    def threads(self, device: int, kernel: object) -> int:
        return self.bound

    def residency(self, device: int, kernel: object, threads: int, shared: int) -> Residency:
        return self.holds

    def prepare(self, device: int, kernel: object, config: Config) -> Fire:
        def fire(stream: int, table: int) -> None:
            if self.refuses:
                raise LaunchRefused(self.refuses)
            kinds = self.kinds[str(kernel)]
            places = (ctypes.c_void_p * len(kinds)).from_address(table)
            values = (number_at(kind, place or 0) for kind, place in zip(kinds, places, strict=True))
            launched = Launched(str(kernel), config, stream, tuple(values))
            self.launched.append(launched)
            self.compute(launched, self.memory)

        return fire

    @contextmanager
    def arena(self, device: int) -> Iterator[FakeDriver]:
        """Memory that is the test's own arrays."""
        yield self
        self.memory.clear()

    def put(self, array: NDArray[Any]) -> int:
        copy = array.copy()
        self.memory[copy.ctypes.data] = copy
        return int(copy.ctypes.data)

    def get(self, address: int, array: NDArray[Any]) -> None:
        array[...] = self.memory[address]
