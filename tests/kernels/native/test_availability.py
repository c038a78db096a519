"""What admission makes of a native build: each fault has its own reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest

from sm70_moe.admission.checks.machine import layer_device, native_findings
from sm70_moe.decision import Reason, Status
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.refusal import Refusal
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import Device
from sm70_moe.machine.installed import installed_build
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import probe

V100 = Device("cuda:0", (7, 0))
KEY = ("cuda:0", "qpn")


def build_of(result: str | None = "", **changes: object) -> Build:
    tests = {} if result is None else {KEY: result}
    usual = {"id": "a", "expected": "a", "images": frozenset({"sm_70", "sm_90"}), "self_tests": tests}
    return Build(**{**usual, **changes})  # type: ignore[arg-type]  # made of parts of different types


@pytest.mark.parametrize(
    ("build", "reasons"),
    [
        (build_of(), []),
        (None, [Reason.BUILD_MISSING]),
        (build_of(expected="b"), [Reason.BUILD_STALE]),
        (build_of(images=frozenset({"sm_90"})), [Reason.ARCH_MISSING]),
        (build_of(backends={"qpn": frozenset({"sm_90"})}), [Reason.ARCH_MISSING]),
        (build_of(backends={"grouped": frozenset({"sm_70"})}), [Reason.ARCH_MISSING]),
        (build_of(backends={"qpn": frozenset({"sm_70"})}), []),
        (build_of("largest error is 3 times its bound"), [Reason.SELF_TEST_FAILED]),
        (build_of(Refusal("CUDA_ERROR_NO_BINARY_FOR_GPU")), [Reason.LAUNCH_REFUSED]),
        (build_of(None), [Reason.FACT_UNKNOWN]),
    ],
)
def test_reasons(build: Build | None, reasons: list[Reason]) -> None:
    """Missing, stale, no image, wrong answer, refused by the driver, never tested."""
    machine = Machine((V100,), {}, build)
    finding, device = layer_device(LayerFacts(layer="a", device="cuda:0"), machine)
    findings = native_findings("qpn", finding, device, machine)
    assert [f.reason for f in findings if f.status not in (Status.PASS, Status.SKIPPED)] == reasons


def test_the_drivers_text_is_in_the_finding() -> None:
    """So that nobody has to start again to see it."""
    machine = Machine((V100,), {}, build_of(Refusal("CUDA_ERROR_X: words")))
    finding, device = layer_device(LayerFacts(layer="a", device="cuda:0"), machine)
    observed = native_findings("qpn", finding, device, machine)[-1].observed
    assert observed == "CUDA_ERROR_X: words"
    assert type(observed) is str


def test_made_up_devices_are_not_tested() -> None:
    """`explain --capability` speaks of a device that is not there: nothing runs for it."""
    build = probe(devices=(V100,)).build
    assert build is None or len(build.self_tests) == 0


def test_self_tests_of_real_devices_wait(lacking: Callable[[str], NoReturn]) -> None:
    """One for each device and native backend or option of one, and asking for the build runs none of them."""
    natives = {name: NativeBackend(name) for name in ("qpn", "grouped")}
    build = installed_build(backends=natives, devices=(V100, Device("cuda:1", (7, 0))))
    if build is None:
        lacking("this installation has no native build")
    assert sorted(build.self_tests) == [
        ("cuda:0", "fused_decode"),
        ("cuda:0", "grouped"),
        ("cuda:0", "qpn"),
        ("cuda:1", "fused_decode"),
        ("cuda:1", "grouped"),
        ("cuda:1", "qpn"),
    ]


def test_settings_reach_the_backends(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder and the switch of the settings are the native backends' own."""
    monkeypatch.setattr("sm70_moe.machine.probe.installed_build", lambda *arguments: None)
    backend = probe(kernels=tmp_path, dependent=False).backends["qpn"]
    assert isinstance(backend, NativeBackend)
    assert (backend.folder, backend.dependent) == (tmp_path, False)
