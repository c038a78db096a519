"""What the management library says of a device, and what is made of its silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sm70_moe.benchmark import gpu
from sm70_moe.benchmark.gpu import Management, gpu_state, held_down, nvml_index, switched
from sm70_moe.machine.devices import Device


class NVMLError(Exception):
    pass


def refused(*arguments: object) -> None:
    raise NVMLError("not supported")


def library(**functions: Any) -> Any:
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda place: f"handle {place}",
        nvmlDeviceGetName=lambda handle: "Tesla V100",
        **functions,
    )


FOUND = tuple((f"GPU-{letter}", Device(f"cuda:{i}", (7, 0), "Tesla V100")) for i, letter in enumerate("abc"))


@pytest.mark.parametrize(
    ("visible", "device", "index"),
    [(None, "cuda:1", 1), (None, "cuda", 0), ("2,0", "cuda:0", 2), ("GPU-b", "cuda:0", 1), ("2", "cuda:1", None)],
)
def test_index(monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, index: int | None) -> None:
    """CUDA_VISIBLE_DEVICES is undone."""
    monkeypatch.setattr(gpu, "nvml_devices", lambda: FOUND)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml_index(device) == index


@pytest.mark.parametrize(
    ("visible", "device", "index"), [(None, "cuda:1", None), ("2,0", "cuda:0", None), ("GPU-b", "cuda:0", 1)]
)
def test_an_index_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, index: int
) -> None:
    """CUDA's own order is not the library's; a UUID is one GPU, and CUDA's own word goes before everything."""
    monkeypatch.setattr(gpu, "nvml_devices", lambda: FOUND)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml_index(device) == index
    monkeypatch.setattr(gpu, "cuda_uuid", lambda device: "GPU-c")
    assert nvml_index(device) == 2


@pytest.mark.parametrize(("model", "handle"), [("Tesla V100", "handle 0"), ("H200", None)])
def test_another_model_in_its_place(monkeypatch: pytest.MonkeyPatch, model: str, handle: str | None) -> None:
    """Where the library numbers devices otherwise than CUDA, nothing is said rather than something wrong."""
    monkeypatch.setattr(gpu, "nvml_devices", lambda: FOUND)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", library())
    assert Management.open("cuda:0", model).handle == handle


def test_state() -> None:
    """Numbers in plain units, reasons by name; None for what the device does not tell."""
    nvml = library(
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1380, 2: 877}[kind],
        nvmlDeviceGetPowerUsage=lambda handle: 250_500,
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
        nvmlDeviceGetPerformanceState=refused,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x1 | 0x4 | 0x40,
    )
    assert gpu_state(Management(nvml, "handle")) == {
        "sm_mhz": 1380,
        "memory_mhz": 877,
        "power_watts": 250.5,
        "celsius": 61,
        "performance_state": None,
        "held_down_by": ["power cap (software)", "temperature (hardware)"],
    }
    assert set(gpu_state(Management(nvml, None)).values()) == {None}


def test_small_answers() -> None:
    """Unknown is None, not off."""
    assert [switched(x) for x in (None, [1, 0], [0, 1], 1)] == [None, "on", "off", "on"]
    assert [held_down(x) for x in (None, 0, 1)] == [None, [], []]
