"""Foreign code is a boundary: what a driver's package raises is a finding, and stops nobody who required nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sm70_moe import AdmissionRefused, AdmissionService
from sm70_moe.decision import Reason, Status
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.pending import Pending
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
QUESTIONS = {"self_tests": "qpn_m1", "residencies": "fused_decode"}
"""What is asked of a driver, and the feature that needs its answer."""

ERRORS = [
    AttributeError("module 'cuda.bindings.driver' has no attribute 'cuKernelGetFunction'"),
    ImportError("libcuda.so.1: cannot open shared object file"),
    TypeError("an integer is required"),
    KeyError("sm_70"),
    OSError("no such device"),
    SystemExit(3),
]


def machine(error: BaseException, question: str) -> Machine:
    """A machine of which everything is right but the answers to one question."""
    base = fake_machine()
    assert base.build is not None

    def asked() -> Any:
        raise error

    pending = Pending(dict.fromkeys(getattr(base.build, question), asked))
    return replace(base, build=replace(base.build, **{question: pending}))


@pytest.mark.parametrize("question", list(QUESTIONS))
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_driver_that_raises_is_a_finding(error: BaseException, question: str) -> None:
    """Nothing is required: it falls back with what was raised; under `1` it is refused with the same."""
    feature, found = QUESTIONS[question], machine(error, question)
    if feature != "fused_decode":
        with AdmissionService(settings(), policy=FIRST, machine=found) as service:
            plan = service.admit(contract_facts(FIRST))
        decision = plan.admission.decision(feature)
        (finding,) = [one for one in decision.obstacles if one.status is Status.ERROR]
        assert (finding.reason, str(finding.observed)) == (Reason.CHECK_BROKE, f"{type(error).__name__}: {error}")
        assert plan.supported
    required = AdmissionService(settings({feature: "1"}), policy=FIRST, machine=found)
    with pytest.raises(AdmissionRefused) as refused:
        required.admit(contract_facts(FIRST))
    (decision,) = [one for one in refused.value.decisions if one.feature == feature]
    assert Reason.CHECK_BROKE in decision.reasons


@pytest.mark.parametrize("ask", [NativeBackend.self_test, NativeBackend.residency], ids=["self-test", "residency"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_backends_own_questions_are_asked_behind_the_boundary(
    error: BaseException, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a driver of another version: not the backend, but who asks it, turns what it raises into a text."""
    backend = NativeBackend("qpn")

    def opened(self: NativeBackend, device: str) -> Any:
        raise error

    monkeypatch.setattr(NativeBackend, "launcher", opened)
    pending = Pending({("cuda:0", "qpn"): lambda: ask(backend, "cuda:0")})
    assert str(pending["cuda:0", "qpn"]) == f"{type(error).__name__}: {error}"


def test_the_operator_can_still_stop_it() -> None:
    """Control-C is no answer of a driver."""
    with pytest.raises(KeyboardInterrupt):
        AdmissionService(settings(), policy=FIRST, machine=machine(KeyboardInterrupt(), "self_tests")).admit(
            contract_facts(FIRST)
        )
