"""Launches that the driver refuses: its words are in the record, older routes run, and the device goes on working."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sm70_moe.decision import Outcome, Reason
from sm70_moe.errors import AdmissionRefused, BackendError
from sm70_moe.evidence.trial import same_bits
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.devices import CudaDriver
from sm70_moe.kernels.native.driver import Config
from sm70_moe.kernels.native.refusal import LaunchRefused, Refusal
from sm70_moe.kernels.native.steps import CALL, Case, bank_arguments, decode, numbers

pytestmark = pytest.mark.gpu

TOO_MANY = 2048
"""Threads; no device has blocks of that size, so that nothing starts and nothing is left behind."""


class Refusing(CudaDriver):
    """The real driver, asked for what it cannot do."""

    def prepare(self, device: int, kernel: object, config: Config):
        return super().prepare(device, kernel, replace(config, threads=TOO_MANY))


@pytest.fixture(scope="module")
def subject(layers):
    return layers.make()


@pytest.fixture(scope="module")
def refused(layers):
    """The machine as it would be if the self-tests' launches were refused: the driver's own words."""
    machine = layers.machine()
    tests = {("cuda:0", name): NativeBackend(name, driver=Refusing).self_test("cuda:0") for name in ("qpn", "grouped")}
    return replace(machine, build=replace(machine.build, self_tests=tests))


def test_a_refused_self_test_is_the_drivers_text(refused) -> None:
    """Not a wrong answer: another reason."""
    for text in refused.build.self_tests.values():
        assert isinstance(text, Refusal)
        assert "CUDA_ERROR_" in text
        assert str(TOO_MANY) in text


def test_auto_falls_back_and_says_why(layers, subject, refused, routes_of, tmp_path) -> None:
    """Reason and text in the decision and in the journal; the older routes are right."""
    service = layers.service(
        subject.sizes, machine=refused, flag=None, SM70_MOE_JOURNAL=str(tmp_path / "journal.jsonl")
    )
    fallen = layers.layer(service, subject.sizes)
    service.summary()
    for feature in ("qpn_m1", "grouped_decode"):
        decision = fallen.layer.plan.admission.decision(feature)
        assert decision.outcome is Outcome.FELL_BACK
        assert decision.reasons == (Reason.LAUNCH_REFUSED,)
    lines = map(json.loads, (tmp_path / "journal.rank0.jsonl").read_text().splitlines())
    found = [
        f for line in lines for f in line.get("findings", ()) if f["check"] == "self-test" and f["status"] == "fail"
    ]
    assert {f["reason"] for f in found} == {"LAUNCH_REFUSED"}
    assert all("CUDA_ERROR_" in f["observed"] for f in found)
    with routes_of(fallen.layer) as taken:
        assert fallen.judge(fallen.mixed(1)).ok
        assert fallen.judge(fallen.mixed(4)).ok
    assert set(taken) == {"legacy_single_token", "legacy"}


def test_require_refuses(layers, subject, refused) -> None:
    """`1` fails closed, with the driver's words."""
    service = layers.service(subject.sizes, machine=refused)
    with pytest.raises(AdmissionRefused, match="CUDA_ERROR_"):
        service.admit(layers.facts(service))


def test_a_refused_launch_of_a_layer_leaves_the_layer_working(subject) -> None:
    """The second kernel of a call is refused: an error by name, and the next call has the bits of the last."""
    call = subject.mixed(3, seed=2)
    before = subject.answer(call)
    banks, native = subject.layer.banks, subject.layer.plan.admission.machine.backends["grouped"]
    case = Case(banks.shape, banks.layout, subject.sizes.top_k, 3, "sm_90", False)
    first, second = decode(case)
    planes = {
        f"{name}_{plane}": tensor.data_ptr()
        for name, bank in (("w13", banks.w13), ("w2", banks.w2))
        for plane, tensor in bank.planes.items()
    }
    program = native.launcher(str(subject.device)).program(
        (first, replace(second, threads=TOO_MANY)),
        varying=CALL,
        values={**numbers(case), **bank_arguments(planes)},
        sizes={},
    )
    out, inner = torch.empty_like(call.x), call.x.new_empty(*call.ids.shape, subject.sizes.intermediate)
    tensors = (call.x, call.ids, call.weights, out, inner)
    with pytest.raises(LaunchRefused, match=rf"{second.kernel}.*CUDA_ERROR"):
        program(torch.cuda.current_stream().cuda_stream, *(tensor.data_ptr() for tensor in tensors))
    torch.cuda.synchronize()
    assert same_bits(subject.answer(call), before)


def test_what_a_backend_itself_refuses(subject) -> None:
    """Called past the plan, a native backend names the argument and launches nothing."""
    native = subject.layer.plan.admission.machine.backends["grouped"]
    call, banks = subject.call(2), subject.layer.banks
    poison = torch.full((2 * subject.sizes.hidden + 1,), torch.nan, dtype=torch.float16, device=subject.device)
    out = poison[1:].view(2, -1)
    with pytest.raises(BackendError, match="out starts at no multiple of 16"):
        native.run(banks, Call(call.x, call.ids, call.weights, out))
    with pytest.raises(BackendError, match="x has strides"):
        native.run(banks, Call(call.x.t().contiguous().t(), call.ids, call.weights, torch.empty_like(call.x)))
    nine = subject.call(9)
    with pytest.raises(BackendError, match="9 tokens"):
        native.run(banks, Call(nine.x, nine.ids, nine.weights, torch.empty_like(nine.x)))
    assert poison.isnan().all()
