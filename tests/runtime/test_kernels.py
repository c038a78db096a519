"""What a service does about kernels that a layer needs and the build does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sm70_moe.admission.admit import admit
from sm70_moe.errors import BackendError
from sm70_moe.kernels import build as build_module
from sm70_moe.kernels.build import Job
from sm70_moe.kernels.build import specialiser as specialiser_module
from sm70_moe.kernels.build.entries import Entries
from sm70_moe.kernels.build.images import RUN_TIME, SPECIALISED, Choice
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.machine.build import images_id
from sm70_moe.machine.machine import Machine
from sm70_moe.plan.plan import Plan, compare_plans
from sm70_moe.policy import load_policy
from sm70_moe.record.explanation import build_line
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
NAMES = [f"decode_{part}.sm_70.hidden2560-intermediate160-top_k10-group32.4-byte.octet32.own" for part in ("w13", "w2")]


class Compiler:
    """Gives bytes that the gate of these tests lets pass, or what `fault` says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fault = ""

    def __call__(self, wanted: Sequence[Job], headers: Mapping[str, str]) -> dict[str, bytes]:
        self.asked += sorted(job.version.name for job in wanted)
        if self.fault:
            raise BackendError(self.fault)
        return {job.key: b"cubin" for job in wanted}


@pytest.fixture(autouse=True)
def _no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/kernels/build/test_compiled.py has the gate."""
    monkeypatch.setattr(specialiser_module, "judged", lambda *_: ())


@pytest.fixture
def logs() -> Iterator[list]:
    with capture_logs() as found:
        yield found


def told(logs: list) -> list[tuple[str, str]]:
    return [(entry["log_level"], entry["text"]) for entry in logs if entry["event"] == "moe kernels"]


def machine(compiler: Compiler | None, missing: str = "", folder: Path | None = None) -> Machine:
    """A V100 whose build has the kernels for any sizes, and this compiler."""
    found = fake_machine()
    assert found.build is not None
    made = compiler and Specialiser(folder and Entries(folder), compiler=compiler, missing=lambda: missing)
    there = {name: frozenset({"sm_70"}) for name in STEPS}
    sizes = {**dict.fromkeys(STEPS, ()), **found.build.sizes}
    return replace(found, build=replace(found.build, backends=there, sizes=sizes, specialiser=made))


def service(found: Machine) -> AdmissionService:
    return AdmissionService(settings(SM70_MOE_COMPACT_METADATA="0"), policy=FIRST, machine=found)


def facts(index: int = 0):
    return contract_facts(FIRST, f"model.layers.{index}.mlp.experts", index=index)


def choices(plan: Plan) -> dict[str, Choice]:
    return {route.backend: route.choice for route in plan.routes if route.choice.version}


def natives(plan: Plan) -> list[str]:
    """Those that have kernels for a layer's sizes: batches have some for any sizes only."""
    return [route.backend for route in plan.routes if route.backend in STEPS and route.backend != "indexed"]


def wanted(found: Machine, plan: Plan) -> str:
    from sm70_moe.plan.specialised import wanted_by

    assert found.build is not None
    (only,) = {images_id(jobs) for _, jobs in wanted_by(plan, found.build)}
    return only


def test_compiled_before_the_plan_is_final(logs: list) -> None:
    """Only what the layer needs, once for all layers that are alike; the keys stand in the plan's digest."""
    compiler = Compiler()
    found = machine(compiler)
    embedded = service(found)
    plans = [embedded.admit(facts(index)) for index in range(3)]
    assert compiler.asked == NAMES
    made = Choice(SPECIALISED, wanted(found, plans[0]))
    assert {k: v for k, v in choices(plans[0]).items() if k != "indexed"} == dict.fromkeys(natives(plans[0]), made)
    assert {"qpn", "grouped"} <= choices(plans[0]).keys()
    assert any(str(made) in str(route) for route in plans[0].fields()["routes"])
    assert len({plan.digest for plan in plans}) == 1
    ((level, text),) = told(logs)
    assert level == "info"
    assert text.startswith("2 kernel versions compiled in ")
    (event,) = [entry for entry in logs if entry["event"] == "moe kernels"]
    assert (event["layer"], sorted(event["compiled"]), event["kept"]) == (plans[0].layer, NAMES, [])
    assert event["seconds"] >= 0


def test_second_start_is_silent(logs: list, tmp_path: Path) -> None:
    """Kept ones make the same plan; a compiler need not be there."""
    first = service(machine(Compiler(), folder=tmp_path / "kernels")).admit(facts())
    logs.clear()
    compiler = Compiler()
    second = service(machine(compiler, "no compiler", tmp_path / "kernels")).admit(facts())
    assert (compiler.asked, told(logs), second.digest) == ([], [], first.digest)


def test_what_cannot_be_made(logs: list) -> None:
    """Kernels for any sizes run; told once for all layers, tried once; the digest tells the ranks."""
    compiler = Compiler()
    good = service(machine(compiler)).admit(facts())
    compiler.fault, compiler.asked = "w2_1: registers 81, at most 80", []
    logs.clear()
    embedded = service(machine(compiler))
    plans = [embedded.admit(facts(index)) for index in range(3)]
    assert choices(plans[0]) == dict.fromkeys((*natives(plans[0]), "indexed"), Choice(RUN_TIME, "fake-build"))
    assert [route.name for route in plans[0].routes] == [route.name for route in good.routes]
    assert compiler.asked == NAMES
    ((level, text),) = told(logs)
    assert level == "warning"
    assert text.endswith("not made on this machine: w2_1: registers 81, at most 80; kernels for any sizes run instead")
    assert len({plan.digest for plan in plans}) == 1
    differing = {difference.field for difference in compare_plans(good, plans[0])}
    assert differing == {"routes"}


def test_no_compiler(logs: list) -> None:
    """Said once, with what to install; never a reason to stop."""
    compiler = Compiler()
    embedded = service(machine(compiler, "nvrtc: found none: pip install nvrtc"))
    plans = [embedded.admit(facts(index)) for index in range(3)]
    assert choices(plans[2])["qpn"] == Choice(RUN_TIME, "fake-build")
    text = "kernels for any sizes run, which are slower: nvrtc: found none: pip install nvrtc"
    assert (compiler.asked, told(logs)) == ([], [("warning", text)])


def test_switched_off(logs: list) -> None:
    """Nothing is compiled and nothing said."""
    plan = service(machine(None)).admit(facts())
    assert choices(plan)["qpn"] == Choice(RUN_TIME, "fake-build")
    assert told(logs) == []


def test_a_build_that_has_them(logs: list) -> None:
    """The build's own go first: nothing is compiled for the geometry of a policy."""
    compiler = Compiler()
    found = machine(compiler)
    assert found.build is not None
    sizes = {"hidden": 2560, "intermediate": 160, "top_k": 10, "group": 32}
    build = replace(found.build, sizes=dict.fromkeys(STEPS, (sizes,)))
    plan = service(replace(found, build=build)).admit(facts())
    assert choices(plan)["qpn"] == Choice(SPECIALISED, "fake-build")
    assert (compiler.asked, told(logs)) == ([], [])


def test_a_layer_without_native_routes(logs: list) -> None:
    """Nothing is compiled for what nobody launches."""
    compiler = Compiler()
    flags = {name: "0" for name, feature in FIRST.features.items() if feature.native}
    AdmissionService(settings(flags), policy=FIRST, machine=machine(compiler)).admit(facts())
    assert (compiler.asked, told(logs)) == ([], [])


def test_deciding_compiles_nothing() -> None:
    """Admission and a plan only say what would be: `explain` needs no compiler run."""
    compiler = Compiler()
    found = machine(compiler)
    plan = Plan(admit(FIRST, settings(SM70_MOE_COMPACT_METADATA="0"), facts(), found))
    assert choices(plan)["qpn"].version == SPECIALISED
    assert build_line(plan) == "native build: fake-build, kernels for these sizes, compiled once on each machine"
    assert compiler.asked == []


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (
            "nvrtc: pip install it",
            ", kernels for any sizes; none for these sizes can be compiled: nvrtc: pip install it",
        ),
        (None, ", kernels for any sizes"),
    ],
)
def test_explained_without_a_compiler(missing: str | None, expected: str) -> None:
    """The hint stands beside the build."""
    found = machine(None if missing is None else Compiler(), missing or "")
    plan = Plan(admit(FIRST, settings(), facts(), found))
    assert build_line(plan) == f"native build: fake-build{expected}"


def test_another_compiler_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with other compilers see it in their digests."""
    one = service(machine(Compiler())).admit(facts())
    monkeypatch.setattr(build_module, "COMPILER", "another")
    assert service(machine(Compiler())).admit(facts()).digest != one.digest


def test_a_stale_build_compiles_nothing(logs: list) -> None:
    """It is not used at all."""
    compiler = Compiler()
    found = machine(compiler)
    assert found.build is not None
    service(replace(found, build=replace(found.build, expected="another"))).admit(facts())
    assert (compiler.asked, told(logs)) == ([], [])
