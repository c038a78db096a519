"""What the device is and how it fares: from NVIDIA's management library, and from torch what that lacks.

Nothing here tells one device from another of its kind: no serial number, UUID or bus address.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sm70_moe.decision import Plain
from sm70_moe.machine.devices import nvml_devices, visible_devices

REASONS: Mapping[int, str] = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap (software)",
    0x008: "slowdown (hardware)",
    0x010: "sync boost",
    0x020: "temperature (software)",
    0x040: "temperature (hardware)",
    0x080: "power brake (hardware)",
    0x100: "display clocks",
}
"""Bits of NVML's clock event reasons."""

HARMLESS = frozenset({"idle"})

SM_CLOCK, MEMORY_CLOCK = 1, 2
"""NVML's numbers of the clocks of the multiprocessors and of the memory."""


def gpu_facts(device: str, nvml: Management) -> dict[str, Plain]:
    """What does not change while a benchmark runs. What nobody knows is None."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": nvml.ask("nvmlSystemGetDriverVersion"),
        "memory_bus_bits": nvml.of("nvmlDeviceGetMemoryBusWidth"),
        "most_sm_mhz": nvml.of("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
        "most_memory_mhz": nvml.of("nvmlDeviceGetMaxClockInfo", MEMORY_CLOCK),
        "ecc": switched(nvml.of("nvmlDeviceGetEccMode")),
        "mig": switched(nvml.of("nvmlDeviceGetMigMode")),
        "power_limit_watts": watts(nvml.of("nvmlDeviceGetEnforcedPowerLimit")),
    }


def gpu_state(nvml: Management) -> dict[str, Plain]:
    """Clocks, power, temperature, and why clocks are held down, now."""
    return {
        "sm_mhz": nvml.of("nvmlDeviceGetClockInfo", SM_CLOCK),
        "memory_mhz": nvml.of("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
        "power_watts": watts(nvml.of("nvmlDeviceGetPowerUsage")),
        "celsius": nvml.of("nvmlDeviceGetTemperature", 0),
        "performance_state": nvml.of("nvmlDeviceGetPerformanceState"),
        "held_down_by": held_down(nvml.of("nvmlDeviceGetCurrentClocksThrottleReasons")),
    }


class Management:
    """NVML's answers about one device; None for every question that it does not answer."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    @classmethod
    def open(cls, device: str, model: str) -> Management:
        """The device that torch calls "cuda:N"; without a handle if another model stands in its place.

        The library stays open: it is asked while things are measured.
        """
        import pynvml

        nvml: Any = pynvml
        place = nvml_index(device)
        try:
            nvml.nvmlInit()
            handle = None if place is None else nvml.nvmlDeviceGetHandleByIndex(place)
            same = handle is not None and nvml.nvmlDeviceGetName(handle) == model
        except nvml.NVMLError:
            return cls(nvml, None)
        return cls(nvml, handle if same else None)

    def ask(self, name: str, *arguments: object) -> Any:
        """Call a function of the library."""
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except (self.nvml.NVMLError, TypeError, ValueError):
            return None

    def of(self, name: str, *arguments: object) -> Any:
        """Call a function about the device."""
        return None if self.handle is None else self.ask(name, self.handle, *arguments)


def nvml_index(device: str) -> int | None:
    """NVML's number of a device that CUDA calls "cuda:N"; None where nobody can tell.

    By its UUID where torch has started CUDA and says it: numbers depend on CUDA_DEVICE_ORDER.
    """
    found, uuid = nvml_devices(), cuda_uuid(device)
    if uuid is not None:
        return next((place for place, (known, _) in enumerate(found) if known == uuid), None)
    tagged = tuple((uuid, replace(one, model=str(place))) for place, (uuid, one) in enumerate(found))
    visible = visible_devices(tagged, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    wanted = "cuda:0" if device == "cuda" else device
    tag = next((one.model for one in visible if one.name == wanted), "")
    return int(tag) if tag.isdigit() else None


def cuda_uuid(device: str) -> str | None:
    """The UUID that CUDA itself says, as NVML writes it."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def switched(mode: Any) -> Plain:
    """(current, pending) of NVML as on or off."""
    if mode is None:
        return None
    current = mode[0] if isinstance(mode, list | tuple) else mode
    return "on" if current else "off"


def watts(milliwatts: Any) -> Plain:
    return None if milliwatts is None else milliwatts / 1000


def held_down(bits: Any) -> list[str] | None:
    """Reasons for clocks below their maximum, by name; None where NVML does not say."""
    if bits is None:
        return None
    return [name for bit, name in REASONS.items() if bits & bit and name not in HARMLESS]
