"""Where a layer can run: the GPUs that the driver's management library tells of, and the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


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


def nvml_devices() -> tuple[tuple[str, Device], ...]:
    """(UUID, device) of every NVIDIA GPU; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            (
                pynvml.nvmlDeviceGetUUID(handle),
                Device(
                    f"cuda:{i}",
                    tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    pynvml.nvmlDeviceGetName(handle),
                    nvml_memory(pynvml, handle),
                ),
            )
            for i, handle in enumerate(handles)
        )
    finally:
        pynvml.nvmlShutdown()


def nvml_memory(nvml: Any, handle: object) -> int | None:
    """Bytes of a GPU's memory; None for one that shares the host's and has no figure of its own."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None


def visible_devices(found: tuple[tuple[str, Device], ...], visible: str | None) -> tuple[Device, ...]:
    """Devices as CUDA numbers them: `visible` has indices or UUID prefixes; the first bad one ends it."""
    if visible is None:
        return tuple(device for _, device in found)
    chosen: list[Device] = []
    for item in visible.split(","):
        name = item.strip()
        matches = [d for i, (uuid, d) in enumerate(found) if name == str(i) or (name and uuid.startswith(name))]
        if len(matches) != 1:
            break
        chosen.append(replace(matches[0], name=f"cuda:{len(chosen)}"))
    return tuple(chosen)
