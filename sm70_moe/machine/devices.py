"""Where a layer can run: the GPUs that the driver's management library tells of, and the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """One place where a layer can run. `capability` is None for a CPU; `memory` is in bytes.

    `unknown` says why nobody can tell which GPU it is, if so; its `capability` is None then too.
    """

    name: str
    capability: tuple[int, int] | None
    model: str = ""
    memory: int | None = None
    unknown: str = ""

    @property
    def architecture(self) -> str:
        """ "sm_70" for compute capability 7.0; "cpu" for a CPU; "unknown" for a GPU that may be several."""
        if self.unknown:
            return "unknown"
        if self.capability is None:
            return "cpu"
        major, minor = self.capability
        return f"sm_{major}{minor}"

    def told(self, architecture: str) -> Device:
        """The device with the architecture that an engine has asked CUDA for, "sm_70"."""
        digits = architecture.removeprefix("sm_")
        return replace(self, capability=(int(digits[:-1]), int(digits[-1])), unknown="")


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


def cuda_devices(environment: Mapping[str, str]) -> tuple[Device, ...]:
    """The GPUs as CUDA will number them in a process with this environment; CUDA is not started."""
    return visible_devices(
        nvml_devices(), environment.get("CUDA_VISIBLE_DEVICES"), environment.get("CUDA_DEVICE_ORDER")
    )


BY_BUS = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER under which CUDA numbers GPUs as the management library does."""

HINT = (
    f"set CUDA_DEVICE_ORDER={BY_BUS}: without it CUDA puts the fastest GPU first and the others in no stated order, "
    "and the GPUs here are of several kinds"
)
MIG_HINT = "a MIG instance does not say of which GPU it is a part, and the GPUs here are of several kinds"
"""Why nobody knows which GPU it is."""


def visible_devices(
    found: tuple[tuple[str, Device], ...], visible: str | None, order: str | None
) -> tuple[Device, ...]:
    """Devices as CUDA numbers them; `found` are all, with their UUIDs, by their place on the bus.

    `visible` and `order` are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, None where not set. An index
    counts in CUDA's own order. Where that is not the bus's, a device keeps only what all GPUs have in
    common. A UUID, or the beginning of one, means one GPU in any order.
    """
    whole = tuple(device for _, device in found)
    sure = order == BY_BUS or len(found) < 2
    items = map(str, range(len(found))) if visible is None else (item.strip() for item in visible.split(","))
    chosen: dict[str, Device] = {}
    for item in items:
        if found and item.startswith("MIG-"):  # CUDA shows one instance at most, and nothing behind it
            chosen[item] = replace(common(parents(found, item), MIG_HINT), memory=None)
            break
        matches = [i for i, (uuid, _) in enumerate(found) if item == str(i) or is_uuid(item, uuid)]
        if len(matches) != 1:
            break  # the first entry that is none ends the list
        known = sure or not item.isdigit()
        key = found[matches[0]][0] if known else item
        if key in chosen:
            return ()  # CUDA shows no device at all where one is named twice
        chosen[key] = whole[matches[0]] if known else common(whole)
    return tuple(replace(device, name=f"cuda:{place}") for place, device in enumerate(chosen.values()))


def is_uuid(item: str, uuid: str) -> bool:
    return item.startswith("GPU-") and uuid.startswith(item)


def parents(found: tuple[tuple[str, Device], ...], instance: str) -> tuple[Device, ...]:
    """GPUs that this part of one may belong to: older drivers name it "MIG-GPU-UUID/1/0", newer ones do not say."""
    named = instance.removeprefix("MIG-").partition("/")[0]
    return tuple(d for uuid, d in found if uuid == named) or tuple(device for _, device in found)


def common(devices: tuple[Device, ...], hint: str = HINT) -> Device:
    """What is true of each of them, by whatever number; `unknown` where they are of several architectures."""
    first, models = devices[0], list(dict.fromkeys(device.model for device in devices))
    memory = first.memory if all(device.memory == first.memory for device in devices) else None
    model = " or ".join(models)
    if any(device.capability != first.capability for device in devices):
        return Device(first.name, None, model, memory, hint)
    return Device(first.name, first.capability, model, memory)
