"""Every check by itself, its finding to the letter: what was expected, what was found, why it was skipped."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from sm70_moe.admission.checks.contract import contract_findings, prepared_group
from sm70_moe.admission.checks.layer import equal, look_at, positive, rank, weight_format
from sm70_moe.admission.checks.machine import (
    backend_findings,
    layer_device,
    missing_image,
    native_findings,
    option_finding,
    plugin_findings,
    self_test,
)
from sm70_moe.admission.checks.operator import layer_list
from sm70_moe.admission.checks.options import Wanted, layout, resident, sizes, sizes_text
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.decision import Finding, Reason, Status
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.declared import FUSED
from sm70_moe.kernels.native.refusal import Crash, Refusal
from sm70_moe.kernels.native.residency import Residency
from sm70_moe.kernels.protocol import Broken
from sm70_moe.layout import BankLayout, Metadata
from sm70_moe.machine.devices import CPU, Device
from sm70_moe.policy import Check, load_policy
from sm70_moe.testing import fake_build, fake_machine

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
V100 = Device("cuda:0", (7, 0))
PASSED, FAILED, UNKNOWN, SKIPPED = Finding.passed, Finding.failed, Finding.unknown, Finding.skipped


def contract(device: Device | None = V100, **changes: Any) -> dict[Check, Finding]:
    return dict(contract_findings(FIRST.contract, look_at(contract_facts(FIRST, **changes)), device))


def test_a_contract_that_is_met() -> None:
    """Each value that it has, as the layer has it."""
    found = contract()
    assert found[Check.INTERMEDIATE] == PASSED("intermediate", 160)
    assert found[Check.TOP_K] == PASSED("top-k", 10)
    assert found[Check.PREPARED_GROUP] == PASSED("prepared group", 32)
    assert found[Check.ARCHITECTURE] == PASSED("architecture", "sm_70")
    assert found[Check.ACTIVATIONS] == PASSED("activation dtype", "float16")
    assert {finding.status for finding in found.values()} == {Status.PASS}


def test_a_contract_that_is_not_met() -> None:
    """Reason, value and name of each."""
    assert contract(top_k=8)[Check.TOP_K] == FAILED("top-k", Reason.TOP_K, 10, 8)
    assert contract(hidden=None)[Check.HIDDEN] == UNKNOWN("hidden", 2560)
    accepted = list(FIRST.contract.architectures or ())
    assert contract(CPU)[Check.ARCHITECTURE] == FAILED("architecture", Reason.ARCHITECTURE, accepted, "cpu")
    assert contract(None)[Check.ARCHITECTURE] == SKIPPED("architecture", "device")
    assert contract(tensor_parallel=3)[Check.INTERMEDIATE] == SKIPPED("intermediate", "tensor-parallel shard")
    plain = contract(format="none", packing=None)
    assert plain[Check.CHECKPOINT_GROUP] == SKIPPED("checkpoint group", "format")
    assert plain[Check.PREPARED_GROUP] == SKIPPED("prepared group", "tensor-parallel shard")


def test_prepared_groups() -> None:
    """Finer than the widest is fine, another number is not; a contract without one says nothing."""
    wide = look_at(contract_facts(FIRST, intermediate=2048, checkpoint_group=128))
    assert prepared_group(32, wide) == PASSED("prepared group", 32)
    assert prepared_group(96, wide) == FAILED("prepared group", Reason.PREPARED_GROUP, 96, 128)
    assert prepared_group(None, wide) is None


ACCEPTED = "awq (gemm), compressed-tensors (pack-quantized), gptq (gptq or gptq_v2)"


@pytest.mark.parametrize(
    ("form", "packing", "found"),
    [
        ("awq", "gemm", PASSED("format", "awq (gemm)")),
        (None, "gemm", UNKNOWN("format", ACCEPTED)),
        ("fp8", None, FAILED("format", Reason.FORMAT, ACCEPTED, "fp8")),
        ("mixed", "a, b", FAILED("format", Reason.FORMAT, ACCEPTED, "mixed (a, b)")),
        ("awq", "gemv", FAILED("format", Reason.FORMAT, ACCEPTED, "awq (gemv)")),
    ],
)
def test_formats(form: str | None, packing: str | None, found: Finding) -> None:
    """What is accepted, whatever was found."""
    assert weight_format(LayerFacts(layer="x", format=form, packing=packing)) == found


def test_a_format_without_a_packing_and_one_in_another_order() -> None:
    """What can be done about it."""
    unknown = weight_format(LayerFacts(layer="x", format="gptq"))
    assert (unknown.status, unknown.expected) == (Status.UNKNOWN, ACCEPTED)
    assert "packing" in unknown.hint
    assert "desc_act" in weight_format(LayerFacts(layer="x", format="gptq", packing="gptq, act-order")).hint


def test_facts_counts_and_ranks() -> None:
    """Types count: True is no 1; a rank lies within its group."""
    assert equal("x", Reason.BITS, 4, 4) == PASSED("x", 4)
    assert equal("x", Reason.BITS, 4, None) == UNKNOWN("x", 4)
    assert equal("x", Reason.BITS, 1, True) == FAILED("x", Reason.BITS, 1, True)
    assert positive("x", Reason.EXPERTS, 1) == PASSED("x", 1)
    assert positive("x", Reason.EXPERTS, 0) == FAILED("x", Reason.EXPERTS, "at least 1", 0)
    assert positive("x", Reason.EXPERTS, None) == UNKNOWN("x", "at least 1")
    assert rank("x", None, 1) == PASSED("x", None)
    assert rank("x", None, None) == PASSED("x", None)
    assert rank("x", None, 2) == UNKNOWN("x", "0 to 1")
    assert rank("x", 3, 4) == PASSED("x", 3)
    assert rank("x", 4, 4) == FAILED("x", Reason.RANK, "0 to 3", 4)
    assert rank("x", -1, None) == FAILED("x", Reason.RANK, "0 to 0", -1)
    assert rank("x", 5, None) == PASSED("x", 5)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("", PASSED("self-test", "known answer")),
        ("3 wrong", FAILED("self-test", Reason.SELF_TEST_FAILED, "the known answer", "3 wrong")),
        (Refusal("no"), FAILED("self-test", Reason.LAUNCH_REFUSED, "the known answer", "no")),
        (Crash("E: x"), Finding("self-test", Status.ERROR, Reason.CHECK_BROKE, "the known answer", "E: x")),
    ],
)
def test_known_answers(result: str, found: Finding) -> None:
    """Right, wrong, refused, broken; and asked of nobody."""
    assert self_test(result, "cuda:0") == found
    unknown = self_test(None, "cuda:3")
    assert (unknown.status, unknown.expected) == (Status.UNKNOWN, "a known-answer call")
    assert "cuda:3" in unknown.hint


def test_plug_ins_have_their_own_known_answers() -> None:
    """The one of the layer's device and of that backend; without one the device alone counts."""
    device = PASSED("device", "cuda:0 sm_70")
    machine = replace(fake_machine(), plugin_tests=MappingProxyType({("cuda:0", "mine"): "wrong"}))
    wrong = FAILED("self-test", Reason.SELF_TEST_FAILED, "the known answer", "wrong")
    assert plugin_findings("mine", device, V100, machine) == (device, wrong)
    assert plugin_findings("other", device, V100, machine) == (device,)
    lacking = UNKNOWN("device", "a CUDA device")
    assert plugin_findings("mine", lacking, V100, machine) == (lacking, SKIPPED("self-test", "device"))


def test_machine_code() -> None:
    """Of this backend, for this architecture; each check names what stopped it."""
    device, machine = PASSED("device", "cuda:0 sm_70"), fake_machine()
    assert native_findings("qpn", device, V100, machine)[1:] == (
        PASSED("native build", "fake-build"), PASSED("native image", "sm_70"), PASSED("self-test", "known answer")
    )  # fmt: skip
    stale = native_findings("qpn", device, V100, fake_machine(build="stale"))[1:]
    assert (stale[0].reason, stale[0].expected, stale[0].observed) == (
        Reason.BUILD_STALE, "fake-build", "fake-build-of-yesterday"
    )  # fmt: skip
    assert stale[1:] == (SKIPPED("native image", "native build"), SKIPPED("self-test", "native build"))
    lacking = UNKNOWN("device", "a CUDA device")
    assert native_findings("qpn", lacking, None, machine)[2:] == (
        SKIPPED("native image", "device"), SKIPPED("self-test", "native image")
    )  # fmt: skip
    build = fake_build()
    assert missing_image(build, "qpn", "sm_80") == FAILED("native image", Reason.ARCH_MISSING, ["sm_70"], "sm_80")
    none = missing_image(replace(build, backends={}), "qpn", "sm_80")
    assert (none.reason, none.expected) == (Reason.ARCH_MISSING, "kernels of backend 'qpn'")


def test_devices() -> None:
    """Unknown, not there, another one than the engine says, no GPU."""
    machine = fake_machine()
    assert layer_device(LayerFacts(layer="x"), machine) == (UNKNOWN("device", "a CUDA device"), None)
    found, there = layer_device(LayerFacts(layer="x", device="cuda:7"), machine)
    assert (found.check, found.reason, found.expected, found.observed) == (
        "device", Reason.DEVICE, ["cuda:0", "cpu"], "cuda:7"
    )  # fmt: skip
    assert there is None
    other, there = layer_device(LayerFacts(layer="x", device="cuda:0", architecture="sm_75"), machine)
    assert (other.check, other.reason, other.expected, other.observed) == ("device", Reason.DEVICE, "sm_75", "sm_70")
    assert there is None
    cpu, there = layer_device(LayerFacts(layer="x", device="cpu"), machine)
    assert (cpu, there) == (FAILED("device", Reason.DEVICE, "a CUDA device", "cpu"), CPU)
    good, there = layer_device(LayerFacts(layer="x", device="cuda:0"), machine)
    assert good == PASSED("device", "cuda:0 sm_70")
    assert there is not None


def test_options() -> None:
    """Who honours it; sizes that kernels were made for; banks that they read."""
    machine = fake_machine()
    assert option_finding("tune_small_shapes", ("legacy", "indexed"), machine) == PASSED("option", "indexed")
    nobody = FAILED("option", Reason.OPTION_UNSUPPORTED, "a backend that honours x", ["legacy", "qpn"])
    assert option_finding("x", ("legacy", "qpn"), machine) == nobody
    banks = BankLayout("octet32", Metadata.THREE_BYTE, 32, True, True)
    wanted, build = Wanted(2560, 160, 10, banks), fake_build()
    text = "hidden 2560, intermediate 160, top_k 10, group 32"
    assert sizes_text(wanted.sizes) == text
    assert sizes(FUSED, wanted, build) == PASSED("kernel sizes", text)
    assert sizes(FUSED, wanted, None) == SKIPPED("kernel sizes", "native build")
    assert sizes(FUSED, wanted, replace(build, backends={})) == SKIPPED("kernel sizes", "native image")
    assert sizes(FUSED, replace(wanted, top_k=None), build) == UNKNOWN("kernel sizes", [text])
    other = sizes(FUSED, replace(wanted, hidden=2048), build)
    assert (other.check, other.reason, other.expected) == ("kernel sizes", Reason.KERNEL_SIZES, [text])
    assert other.observed == text.replace("2560", "2048")
    assert layout(FUSED, wanted) == PASSED("kernel layout", "octet32 3-byte")
    assert layout(FUSED, replace(wanted, banks=None)) == UNKNOWN("kernel layout", "banks of this layer")
    unread = layout(FUSED, replace(wanted, banks=replace(banks, order="tile32x8")))
    assert (unread.check, unread.reason, unread.observed) == (
        "kernel layout", Reason.LAYOUT_UNREADABLE, "tile32x8 3-byte"
    )  # fmt: skip
    assert "octet32 3-byte" in (unread.expected or [])


def test_backends_that_are_not_there() -> None:
    """Missing, broken, and one that is there."""
    machine, layer = fake_machine(), look_at(contract_facts(FIRST))
    route = next(route for route in FIRST.routes if route.backend == "qpn")
    without = replace(machine, backends={"legacy": machine.backends["legacy"]})
    missing = FAILED("backend", Reason.BACKEND_MISSING, "qpn", ["legacy"])
    assert backend_findings(route, layer, "sm_70", without) == (None, (missing,))
    broken = replace(machine, backends={"qpn": Broken("qpn", "undefined symbol")})
    told = FAILED("backend", Reason.BACKEND_BROKEN, "qpn", "undefined symbol")
    assert backend_findings(route, layer, "sm_70", broken) == (None, (told,))
    ability, (first, *_) = backend_findings(route, layer, "sm_70", machine)
    assert (first, ability is not None) == (PASSED("backend", "qpn"), True)


LAUNCH, BLOCKS = "cooperative launch", "resident blocks"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Residency(True, 80, 5), (PASSED(LAUNCH, True), PASSED(BLOCKS, "5 on each of 80 multiprocessors"))),
        (
            Residency(True, 80, 0),
            (PASSED(LAUNCH, True), FAILED(BLOCKS, Reason.NOT_RESIDENT, "a block on each multiprocessor", "0 blocks")),
        ),
        ("no", (FAILED(LAUNCH, Reason.SELF_TEST_FAILED, "an answer", "no"), SKIPPED(BLOCKS, LAUNCH))),
        (Refusal("no"), (FAILED(LAUNCH, Reason.LAUNCH_REFUSED, "an answer", "no"), SKIPPED(BLOCKS, LAUNCH))),
        (
            Crash("E: x"),
            (Finding(LAUNCH, Status.ERROR, Reason.CHECK_BROKE, "an answer", "E: x"), SKIPPED(BLOCKS, LAUNCH)),
        ),
    ],
    ids=["fits", "no room", "wrong", "refused", "broken"],
)
def test_blocks_that_wait_for_each_other(answer: Any, found: tuple[Finding, ...]) -> None:
    """Both checks, for every answer."""
    build = replace(fake_build(), residencies={("cuda:0", FUSED): answer})
    assert resident(FUSED, V100, build) == found
    unable = resident(FUSED, V100, replace(build, residencies={("cuda:0", FUSED): Residency(False, 80, 5)}))
    assert (unable[0].reason, unable[0].expected, unable[0].observed) == (Reason.NOT_COOPERATIVE, True, False)
    assert unable[1] == SKIPPED(BLOCKS, LAUNCH)
    unasked = resident(FUSED, V100, replace(build, residencies={}))
    assert [(one.check, one.status) for one in unasked] == [(LAUNCH, Status.UNKNOWN), (BLOCKS, Status.UNKNOWN)]


def test_lists_of_layers() -> None:
    """For features that they decide over, and no others."""
    listed, free = FIRST.features["batched_banks"], FIRST.features["compact_metadata"]
    assert layer_list(free, "denied") == ()
    assert layer_list(listed, None) == (PASSED("layer lists"),)
    assert layer_list(listed, "unknown")[0].status is Status.UNKNOWN
    for exclusion, reason in (("denied", Reason.LAYER_DENIED), ("not allowed", Reason.LAYER_NOT_ALLOWED)):
        (found,) = layer_list(listed, exclusion)
        assert (found.check, found.reason, found.expected, found.observed) == (
            "layer lists",
            reason,
            "listed",
            exclusion,
        )
