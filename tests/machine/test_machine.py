"""The probe: devices as CUDA numbers them, no torch, no guess."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sm70_moe.machine.devices import CPU, Device, visible_devices
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import installed_version, probe
from sm70_moe.testing import fake_machine

FOUND = tuple((f"GPU-{letter}", Device(f"cuda:{i}", (7, 0))) for i, letter in enumerate("abc"))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c"]),
        ("", []),
        ("2,0", ["GPU-c", "GPU-a"]),
        ("GPU-b", ["GPU-b"]),
        ("1,-1,0", ["GPU-b"]),
        ("0,7,1", ["GPU-a"]),
        (" 1 , 2 ", ["GPU-b", "GPU-c"]),
    ],
)
def test_visible_devices(visible: str | None, expected: list[str]) -> None:
    """CUDA_VISIBLE_DEVICES picks and orders; the first entry that is none ends the list."""
    marked = tuple((uuid, Device(d.name, d.capability, uuid)) for uuid, d in FOUND)
    devices = visible_devices(marked, visible)
    assert [d.model for d in devices] == expected
    assert [d.name for d in devices] == [f"cuda:{i}" for i in range(len(expected))]


def test_a_machine_always_has_its_cpu() -> None:
    """The CPU is a device like others, the last one."""
    assert probe().devices[-1] == CPU
    assert CPU.architecture == "cpu"


def test_unnumbered_cuda_is_the_first_device() -> None:
    """ "cuda" means "cuda:0", as in torch."""
    machine = fake_machine()
    assert machine.device("cuda") is machine.devices[0]
    assert machine.device("cuda:1") is None


def test_native_build_is_looked_up_only_when_wanted() -> None:
    """The probe records that nobody looked."""
    assert probe(native=False).build_looked_up is False


def test_fingerprint_tells_machines_apart() -> None:
    """Another architecture or another build is another machine; the same twice is the same."""
    prints = [fake_machine().fingerprint, fake_machine((8, 0)).fingerprint, fake_machine(build="missing").fingerprint]
    assert len(set(prints)) == 3
    assert fake_machine().fingerprint == prints[0]
    assert isinstance(fake_machine(), Machine)


def test_missing_distribution_has_no_version() -> None:
    """What is not installed has no version, and that is no error."""
    assert installed_version("no-such-distribution-of-ours") is None


def test_probe_imports_no_torch() -> None:
    """Looking at a machine neither imports torch nor starts CUDA."""
    code = "import sys; from sm70_moe.machine.probe import probe; probe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
