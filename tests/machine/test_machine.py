"""The probe: devices as CUDA numbers them, no torch, no guess."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.decision import Finding, Reason, Status
from sm70_moe.machine.devices import CPU, Device, visible_devices
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import installed_version, probe
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FOUND = tuple((f"GPU-{letter}", Device(f"cuda:{i}", (7, 0))) for i, letter in enumerate("abc"))
TURING, VOLTA = Device("cuda:0", (7, 5), "T4", 16), Device("cuda:1", (7, 0), "V100", 32)
MIXED = (("GPU-t", TURING), ("GPU-v", VOLTA))
"""As the management library lists them: a Turing in the first slot, a Volta in the second."""

SEEN = [
    (None, ["GPU-a", "GPU-b", "GPU-c"]),
    ("", []),
    ("2,0", ["GPU-c", "GPU-a"]),
    ("GPU-b", ["GPU-b"]),
    ("GPU-b,0", ["GPU-b", "GPU-a"]),
    ("1,-1,0", ["GPU-b"]),
    ("0,7,1", ["GPU-a"]),
    (" 1 , 2 ", ["GPU-b", "GPU-c"]),
    ("1,1", []),
    ("0,1,0", []),
    ("GPU-b,GPU-b", []),
    ("1,GPU-b", []),
    ("0,,1", ["GPU-a"]),
    ("G", []),
    ("GPU-", []),
]


@pytest.mark.parametrize(("visible", "expected"), SEEN)
def test_visible_devices(visible: str | None, expected: list[str]) -> None:
    """By bus, the variable picks and orders; the first entry that is none ends it, one named twice empties it."""
    marked = tuple((uuid, Device(d.name, d.capability, uuid)) for uuid, d in FOUND)
    devices = visible_devices(marked, visible, "PCI_BUS_ID")
    assert [d.model for d in devices] == expected
    assert [d.name for d in devices] == [f"cuda:{i}" for i in range(len(expected))]


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST", "", "pci_bus_id"])
@pytest.mark.parametrize(("visible", "expected"), SEEN)
def test_one_kind_of_gpu_is_known_in_any_order(visible: str | None, expected: list[str], order: str | None) -> None:
    """Whichever GPU CUDA means, it is one of these."""
    devices = visible_devices(FOUND, visible, order)
    # index and UUID of what may be one GPU: nobody can tell that it is named twice
    expected = ["GPU-?", "GPU-b"] if visible == "1,GPU-b" else expected
    assert [(d.name, d.capability) for d in devices] == [(f"cuda:{i}", (7, 0)) for i in range(len(expected))]


@pytest.mark.parametrize(
    ("order", "visible", "expected"),
    [
        ("PCI_BUS_ID", None, ["sm_75", "sm_70"]),
        ("PCI_BUS_ID", "1,0", ["sm_70", "sm_75"]),
        ("PCI_BUS_ID", "1", ["sm_70"]),
        (None, None, ["unknown", "unknown"]),
        ("FASTEST_FIRST", None, ["unknown", "unknown"]),
        (None, "1", ["unknown"]),
        ("FASTEST_FIRST", "1,0", ["unknown", "unknown"]),
        (None, "GPU-v", ["sm_70"]),
        ("FASTEST_FIRST", "GPU-v,GPU-t", ["sm_70", "sm_75"]),
        (None, "GPU-v,0", ["sm_70", "unknown"]),
        (None, "0,0", []),
        (None, "2", []),
        (None, "MIG-GPU-v/1/0,0", ["sm_70"]),
        (None, "MIG-11,GPU-v", ["unknown"]),
        ("PCI_BUS_ID", "MIG-11", ["unknown"]),
    ],
)
def test_two_kinds_of_gpu(order: str | None, visible: str | None, expected: list[str]) -> None:
    """CUDA's order is the library's by bus only; else an index is unknown, a UUID is not."""
    devices = visible_devices(MIXED, visible, order)
    assert [d.architecture for d in devices] == expected
    assert [d.name for d in devices] == [f"cuda:{i}" for i in range(len(expected))]
    hint = "MIG instance" if visible and "MIG" in visible else "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert all((hint in d.unknown) is (d.architecture == "unknown") for d in devices)


def test_what_all_gpus_have_in_common_is_known() -> None:
    """One architecture in two sizes: the architecture counts, the memory is not known; an instance has its own."""
    two = (("GPU-s", Device("cuda:0", (7, 0), "V100-16GB", 16)), ("GPU-l", Device("cuda:1", (7, 0), "V100-32GB", 32)))
    assert visible_devices(two, "1", None) == (Device("cuda:0", (7, 0), "V100-16GB or V100-32GB", None),)
    assert visible_devices(two, "MIG-GPU-l/7/0", None) == (Device("cuda:0", (7, 0), "V100-32GB", None),)
    assert visible_devices(two[:1], None, None) == (two[0][1],)
    assert visible_devices((), "MIG-11", None) == ()


def machine(order: str | None) -> Machine:
    return replace(fake_machine(), devices=(*visible_devices(MIXED, None, order), CPU))


FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def decided(order: str | None, **facts: object) -> tuple[str, list[Finding]]:
    """The architecture that counts for a layer on cuda:1, and what is said of its device."""
    admission = admit(FIRST, settings(), contract_facts(FIRST, device="cuda:1", **facts), machine(order))
    found = [f for f in admission.decision("qpn_m1").findings if f.check == "device"]
    return admission.device.architecture if admission.device else "none", found


def test_a_layer_on_a_gpu_that_nobody_knows_is_unknown() -> None:
    """Never a guess: reason DEVICE, status unknown, and what to set; by bus it is the Volta."""
    for order in (None, "FASTEST_FIRST"):
        architecture, (finding,) = decided(order)
        assert architecture == "none"
        assert (finding.status, finding.reason) == (Status.UNKNOWN, Reason.DEVICE)
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in finding.hint
    assert decided("PCI_BUS_ID")[0] == "sm_70"


def test_the_engines_word_decides_where_the_machine_has_none() -> None:
    """An engine has started CUDA and may ask it; where both know, they must say the same."""
    for architecture in ("sm_70", "sm_75"):
        told, (finding,) = decided(None, architecture=architecture)
        assert (told, finding.status) == (architecture, Status.PASS)
    told, (finding,) = decided("PCI_BUS_ID", architecture="sm_75")
    assert (told, finding.reason, finding.expected, finding.observed) == ("none", Reason.DEVICE, "sm_75", "sm_70")


def test_who_told_the_architecture_is_no_difference_of_plans() -> None:
    """Ranks of which one asked CUDA and one the library run alike."""
    plans = [
        Plan(admit(FIRST, settings(), contract_facts(FIRST, **told), fake_machine()))
        for told in ({}, {"architecture": "sm_70"})
    ]
    assert plans[0].digest == plans[1].digest


def test_the_probe_reads_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA would read is read."""
    monkeypatch.setattr("sm70_moe.machine.devices.nvml_devices", lambda: MIXED)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert [d.architecture for d in probe(native=False).devices] == ["unknown", "unknown", "cpu"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [d.architecture for d in probe(native=False).devices] == ["sm_70", "cpu"]


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
