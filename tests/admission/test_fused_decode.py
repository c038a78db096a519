"""The option `fused_decode`: truth table, a reason for each check that stops it, and what a layer gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sm70_moe.admission.admit import Admission, admit
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.decision import Outcome, Reason
from sm70_moe.errors import SettingsError
from sm70_moe.kernels.declared import FUSED
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.refusal import Refusal
from sm70_moe.kernels.native.residency import Residency
from sm70_moe.machine.build import Build
from sm70_moe.machine.installed import kernel_sizes
from sm70_moe.machine.machine import Machine
from sm70_moe.plan.layergroup import collapse
from sm70_moe.plan.memory import backend
from sm70_moe.plan.plan import Plan, compare_plans
from sm70_moe.policy import Policy, load_policy, shipped_policies
from sm70_moe.record.explanation import explain
from sm70_moe.runtime.wants import wants_native
from sm70_moe.settings.settings import Settings
from sm70_moe.testing import fake_build, fake_machine, settings

POLICY = load_policy("qwen3.8-flash-next-awq-tp4")
KEY = ("cuda:0", FUSED)
USUAL: dict[str, str] = {(name, option): "" for name in ("cuda:0",) for option in ("qpn", "grouped", "indexed", FUSED)}


def build(**changes: Any) -> Build:
    return replace(fake_build(images={"sm_70", "sm_90"}), **changes)


def decide(flag: str | None, made: Build | Machine | None = None, policy: Policy = POLICY, **facts: Any) -> Admission:
    machine = made if isinstance(made, Machine) else fake_machine(build=made or build())
    asked = settings() if flag is None else settings(SM70_MOE_FUSED_DECODE=flag)
    return admit(policy, asked, contract_facts(policy, **facts), machine)


LACKING = {
    "nothing": (build(), []),
    "its image": (build(backends={n: frozenset({"sm_70"}) for n in ("qpn", "grouped")}), [Reason.ARCH_MISSING]),
    "its image for this device": (
        build(backends={"qpn": frozenset({"sm_70"}), "grouped": frozenset({"sm_70"}), FUSED: frozenset({"sm_90"})}),
        [Reason.ARCH_MISSING],
    ),
    "its sizes": (build(sizes={FUSED: ({"hidden": 2048, "intermediate": 160, "top_k": 10, "group": 32},)}),
                  [Reason.KERNEL_SIZES]),
    "any sizes": (build(sizes={}), [Reason.KERNEL_SIZES]),
    "cooperative launch": (build(residencies={KEY: Residency(False, 80, 5)}), [Reason.NOT_COOPERATIVE]),
    "room": (build(residencies={KEY: Residency(True, 80, 0)}), [Reason.NOT_RESIDENT]),
    "an answer about room": (build(residencies={KEY: Refusal("CUDA_ERROR_X: words")}), [Reason.LAUNCH_REFUSED]),
    "a way to ask about room": (build(residencies={KEY: "no cuda.core"}), [Reason.SELF_TEST_FAILED]),
    "a question about room": (build(residencies={}), [Reason.FACT_UNKNOWN, Reason.FACT_UNKNOWN]),
    "the right answer": (build(self_tests={**USUAL, KEY: "call 2: 3 numbers were not written"}),
                         [Reason.SELF_TEST_FAILED]),
    "the driver's consent": (build(self_tests={**USUAL, KEY: Refusal("CUDA_ERROR_X")}), [Reason.LAUNCH_REFUSED]),
    "a self-test": (build(self_tests={k: v for k, v in USUAL.items() if k != KEY}), [Reason.FACT_UNKNOWN]),
    "sizes and room": (build(sizes={}, residencies={KEY: Residency(True, 80, 0)}),
                       [Reason.KERNEL_SIZES, Reason.NOT_RESIDENT]),
}  # fmt: skip
"""What the machine lacks, and every reason that is given for it."""


@pytest.mark.parametrize(
    ("flag", "lacking", "outcome"),
    [
        *((None, lacking, Outcome.OFF) for lacking in LACKING),
        *(("0", lacking, Outcome.OFF) for lacking in LACKING),
        ("1", "nothing", Outcome.ADMITTED),
        *(("1", lacking, Outcome.REFUSED) for lacking in LACKING if lacking != "nothing"),
    ],
)
def test_cell(flag: str | None, lacking: str, outcome: Outcome) -> None:
    """Off when unset, whatever there is; `1` is met or an error with every reason. `qpn_m1` stays as it was."""
    made, reasons = LACKING[lacking]
    admission = decide(flag, made)
    decision = admission.decision(FUSED)
    off = {None: [Reason.FLAG_OFF_BY_DEFAULT], "0": [Reason.FLAG_OFF], "1": reasons}
    assert (decision.outcome, list(decision.reasons)) == (outcome, off[flag])
    assert admission.decision("qpn_m1").outcome is Outcome.ADMITTED
    assert [d.feature for d in admission.refused] == [FUSED] * (outcome is Outcome.REFUSED)


@pytest.mark.parametrize("text", ["", "true", "01", " 1", "off"])
def test_other_values_are_errors(text: str) -> None:
    """As for every flag."""
    with pytest.raises(SettingsError, match="SM70_MOE_FUSED_DECODE"):
        decide(text)


def test_expected_and_found_are_told() -> None:
    """A reader need not look up what would have been enough."""
    found = {f.check: f for f in decide("1", LACKING["its sizes"][0]).decision(FUSED).obstacles}
    sizes = found["kernel sizes"]
    assert sizes.expected == ["hidden 2048, intermediate 160, top_k 10, group 32"]
    assert sizes.observed == "hidden 2560, intermediate 160, top_k 10, group 32"
    assert {f.check for f in decide("1", LACKING["room"][0]).decision(FUSED).obstacles} == {
        "resident blocks",
        "self-test",
    }


def test_the_self_test_does_not_run_where_blocks_do_not_fit() -> None:
    """A launch that cannot work is not tried; what it hangs on is named."""
    test = decide("1", LACKING["cooperative launch"][0]).decision(FUSED).obstacles[-1]
    assert (test.check, test.reason, test.observed) == ("self-test", Reason.PREREQUISITE, "resident blocks")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"checkpoint_group": 64}, Reason.NEED_NOT_ADMITTED), ({"hidden": None}, Reason.NEED_NOT_ADMITTED)],
)
def test_it_needs_the_route(facts: dict[str, Any], reason: Reason) -> None:
    """Where `qpn_m1` is not admitted, one launch of it is not either."""
    decision = decide("1", **facts).decision(FUSED)
    assert decision.outcome is Outcome.REFUSED
    assert reason in decision.reasons


def test_without_a_build_or_a_gpu() -> None:
    """Everything behind it is skipped; nothing breaks. Banks need neither."""
    for machine in (fake_machine(build="missing"), fake_machine(build="stale"), fake_machine(None)):
        decision = decide("1", machine, device="cuda:0" if machine.device("cuda:0") else "cpu").decision(FUSED)
        assert decision.outcome is Outcome.REFUSED
        skipped = [f.check for f in decision.obstacles if f.reason is Reason.PREREQUISITE]
        assert skipped[-3:] == ["cooperative launch", "resident blocks", "self-test"]
        assert ("kernel sizes" in skipped) == (machine.build is None or machine.build.id != machine.build.expected)
        assert "kernel layout" not in skipped


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_sizes_hang_on_no_device(capability: tuple[int, int] | None) -> None:
    """On a CPU, or a GPU without an image, sizes without a kernel are still told."""
    sizes = {"hidden": 2048, "intermediate": 160, "top_k": 10, "group": 32}
    machine = fake_machine(capability, build=replace(fake_build(), sizes={FUSED: (sizes,)}))
    device = "cuda:0" if capability else "cpu"
    assert Reason.KERNEL_SIZES in decide("1", machine, device=device).decision(FUSED).reasons


def test_banks_that_its_kernels_do_not_read() -> None:
    """2.5-byte metadata has no kernel in one launch; the decision over metadata stands before."""
    feature = POLICY.features["compact_metadata"].model_copy(update={"metadata": "2.5-byte"})
    policy = POLICY.model_copy(update={"features": {**POLICY.features, "compact_metadata": feature}})
    decision = decide("1", policy=policy).decision(FUSED)
    assert decision.reasons == (Reason.LAYOUT_UNREADABLE,)
    assert decision.obstacles[0].expected == ["octet32 4-byte", "octet32 3-byte"]
    assert decision.obstacles[0].observed == "octet32 2.5-byte"


def test_options_are_decided_last() -> None:
    """Also where a policy's file has them first: layouts and routes must be known."""
    features = {FUSED: POLICY.features[FUSED], **POLICY.features}
    policy = POLICY.model_copy(update={"features": features})
    assert decide("1", policy=policy).decision(FUSED).outcome is Outcome.ADMITTED


@pytest.mark.parametrize("policy", [p for p in shipped_policies() if FUSED in p.features], ids=lambda p: p.name)
def test_every_policy_that_has_it(policy: Policy) -> None:
    """Admitted for a layer as the contract has it, off by default."""
    contract = policy.contract
    assert contract.hidden
    assert contract.intermediate
    assert contract.top_k
    sizes = {"hidden": contract.hidden, "intermediate": contract.intermediate, "top_k": contract.top_k, "group": 32}
    machine = fake_machine(build=build(images=frozenset(contract.architectures or ()), sizes={FUSED: (sizes,)}))
    assert decide("1", machine, policy).decision(FUSED).outcome is Outcome.ADMITTED
    assert policy.features[FUSED].unset == "off"


def test_it_is_part_of_the_plan() -> None:
    """Two plans that differ in it have different digests; the difference has a name, and routes are the same."""
    one, two = Plan(decide("1")), Plan(decide(None))
    assert one.digest != two.digest
    assert {d.field for d in compare_plans(one, two)} == {f"flags.{FUSED}", f"outcomes.{FUSED}"}
    assert [r.name for r in one.routes] == [r.name for r in two.routes]


def test_it_is_explained() -> None:
    """A line of its own, whatever was decided."""
    for flag, words in (("1", "admitted"), (None, "off")):
        lines = explain(list(collapse([decide(flag)]))).splitlines()
        assert [line.split()[2] for line in lines if line.split()[:1] == [FUSED]] == [words]


def test_which_backend_a_layer_gets() -> None:
    """The route's name and backend stay; the backend runs in one launch for layers that were admitted only."""
    machine = replace(fake_machine(), backends={**fake_machine().backends, "qpn": NativeBackend("qpn")})
    plain, other = (backend(decide(flag, machine), "qpn") for flag in (None, "1"))
    assert isinstance(plain, NativeBackend)
    assert isinstance(other, NativeBackend)
    assert (plain.fused, other.fused) == (False, True)
    assert backend(decide("1", machine), "qpn") is other
    scratch = [Plan(decide(flag, machine)).memory.workspace["qpn_m1", 1] for flag in (None, "1")]  # type: ignore[union-attr]  # the layer is supported
    assert scratch[1] - scratch[0] == 512  # 128 bytes, in whole blocks


def test_the_setting_does_not_look_for_a_build_by_itself() -> None:
    """With `qpn_m1` and the others at 0, an option that is off asks for nothing."""
    off = {"qpn_m1": "0", "grouped_decode": "0", "indexed_prefill": "0"}
    assert wants_native([POLICY], settings(off)) is False
    assert wants_native([POLICY], Settings.from_env({}, flags={**off, FUSED: "1"})) is True


def test_sizes_are_read_from_the_build() -> None:
    """What the images of a backend's and an option's sources were made for, each once."""

    class Image:
        def __init__(self, source: str, **sizes: int) -> None:
            self.version = type("Version", (), {"source": source, "sizes": tuple(sizes.items())})

    class Cubins:
        images = (
            Image("decode_fused", hidden=256, top_k=4),
            Image("decode_fused", hidden=256, top_k=4),
            Image("decode_fused", hidden=128, top_k=2),
            Image("decode_w13", hidden=64),
            Image("decode_w2", hidden=64),
            Image("decode_w2"),
        )

    one, both = ({"hidden": 128, "top_k": 2}, {"hidden": 256, "top_k": 4}), ({"hidden": 64},)
    assert kernel_sizes(Cubins()) == {FUSED: one, "qpn": both, "grouped": both, "decode": both, "indexed": ()}  # type: ignore[arg-type]  # what is read of it


@pytest.mark.parametrize(
    ("lacking", "outcome"),
    [("its sizes", Outcome.FELL_BACK), ("any sizes", Outcome.FELL_BACK), ("cooperative launch", Outcome.REFUSED)],
)
def test_an_odd_layer_of_a_mixed_model(lacking: str, outcome: Outcome) -> None:
    """Sizes are the layer's own: under admit-the-rest others may still have it. What the device lacks, all lack."""
    mixed = POLICY.model_copy(update={"on": POLICY.on.model_copy(update={"mixed_model": "admit-the-rest"})})
    made, reasons = LACKING[lacking]
    decision = decide("1", made, mixed).decision(FUSED)
    assert (decision.outcome, list(decision.reasons)) == (outcome, reasons)
