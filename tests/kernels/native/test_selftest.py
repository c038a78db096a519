"""The known-answer call: an answer that is right, and every way of being wrong that it must see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.build.versions import Scope, versions
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.capability import Span
from sm70_moe.kernels.declared import DECODE, decode
from sm70_moe.kernels.native.answers import Known
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.launch import Launcher, Step
from sm70_moe.kernels.native.pending import Pending
from sm70_moe.kernels.native.refusal import Refusal
from sm70_moe.kernels.native.selftest import trials
from sm70_moe.kernels.native.steps import Case, Route
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import ORDERS, BankLayout, BankShape, Metadata
from sm70_moe.numbers.codes import Codes, ExpertCodes
from sm70_moe.testing.driver import FakeDriver, Launched

SMALL = Geometry(hidden=256, intermediate=64, experts=16, top_k=4, group=32)

LAYOUTS = [
    BankLayout(order, metadata, 32, interleaved, True)
    for order in ORDERS
    for metadata in Metadata
    for interleaved in (False, True)
]


def banks_of(known: Known, geometry: Geometry, layout: BankLayout) -> Banks:
    """The same layer through the package's own packing; experts without weights stay undefined."""
    banks = allocate(layout, BankShape(geometry.experts, geometry.hidden, geometry.intermediate), "cpu")
    for expert, matrices in enumerate(known.experts):
        gate, up, down = (Codes(*(torch.from_numpy(array) for array in (m.codes, m.zeros, m.scales))) for m in matrices)
        banks.fill(expert, ExpertCodes(gate, up, down))
    banks.filled.update(range(geometry.experts))
    return banks


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.tag)
def test_planes_are_those_that_banks_have(layout: BankLayout) -> None:
    """Packed twice, by code that shares nothing: bit for bit the same in every order and metadata."""
    known = Known.make(SMALL, 1)
    banks, planes = banks_of(known, SMALL, layout), known.planes(layout)
    for name, bank in (("w13", banks.w13), ("w2", banks.w2)):
        for plane, tensor in bank.planes.items():
            mine = planes.pop(f"{name}_{plane}")
            assert isinstance(tensor, torch.Tensor)
            theirs = tensor[: len(known.experts)].numpy()
            assert mine.shape == theirs.shape
            assert mine.tobytes() == theirs.tobytes()
    assert planes == {}


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_a_right_route_passes(tokens: int, group: int) -> None:
    """The portable route, which has been judged against the reference, has nothing to complain of."""
    geometry = replace(SMALL, group=group)
    known = Known.make(geometry, tokens)
    out, inner = computed(known, geometry)
    assert known.complaint(inner, out) == ""


def computed(known: Known, geometry: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """Output and activations by the portable route."""
    layout = BankLayout("tile32x8", Metadata.FOUR_BYTE, geometry.group, True, True)
    x, ids, weights = (torch.from_numpy(array) for array in (known.x, known.ids, known.weights))
    out = torch.empty(x.shape, dtype=torch.float16)
    inner = torch.empty((*ids.shape, geometry.intermediate), dtype=torch.float16)
    LegacyBackend().run(banks_of(known, geometry, layout), Call(x, ids, weights, out, inner))
    return out.numpy(), inner.numpy()


def scaled(array: np.ndarray) -> None:
    array[...] *= np.float16(1.1)


def one_left_out(array: np.ndarray) -> None:
    array.reshape(-1)[5] = np.nan


def rolled(array: np.ndarray) -> None:
    array[...] = np.roll(array, 1, axis=-1)


def one_wrong(array: np.ndarray) -> None:
    array.reshape(-1)[7] += np.float16(0.5) + np.abs(array.reshape(-1)[7])


@pytest.mark.parametrize("fault", [scaled, one_left_out, rolled, one_wrong])
@pytest.mark.parametrize("where", [0, 1], ids=["output", "activations"])
def test_faults_are_seen(fault: Callable[[np.ndarray], None], where: int) -> None:
    """A wrong factor, an element that nobody wrote, neighbouring columns mixed up, one wrong number."""
    known = Known.make(SMALL, 4)
    results = computed(known, SMALL)
    fault(results[where])
    assert known.complaint(results[1], results[0]) != ""


def test_activations_of_invalid_slots_are_not_looked_at() -> None:
    """A kernel need not write what nobody reads."""
    known = Known.make(SMALL, 2)
    out, inner = computed(known, SMALL)
    assert known.ids[0, -1] == -1
    inner[0, -1] = np.nan
    assert known.complaint(inner, out) == ""


MANIFEST = """
geometry = ["hidden", "intermediate", "group"]
divides  = {{ hidden = 96 }}
runtime  = {runtime}
[kernels.all]
arguments = ["x", "ids", "weights", "out", "intermediate", "w13_words", "w2_metadata", "w2_scales", "tokens:i32"]
threads   = 32
"""

KINDS = {"all": ("ptr",) * 8 + ("i32",)}


def steps(case: Case) -> tuple[Step, ...]:
    return (Step("fake", "all", grid=(1,), dependent=case.dependent),)


TILES = frozenset({"tile32x8"})
READS = replace(DECODE, groups=frozenset({32, 128}), metadata=frozenset({Metadata.FOUR_BYTE}), orders=TILES)
ROUTE = Route(steps, decode(Span(2, 8), READS), ("fake",))


def launcher_of(folder: Path, driver: FakeDriver, *geometries: Geometry, runtime: str = "true") -> Launcher:
    (folder / "fake.toml").write_text(MANIFEST.format(runtime=runtime))
    manifests = load_manifests(folder)
    scope = Scope((driver.name,), geometries)
    contents = dict.fromkeys(versions(manifests.values(), scope), b"code")
    return Launcher(Cubins.write(folder, "id", "compiler", scope, contents), manifests, 0, driver)


FITS = Geometry(hidden=384, intermediate=64, experts=16, top_k=4, group=32)


def test_what_is_tried(tmp_path: Path) -> None:
    """Each geometry that the kernels take, one of no policy for each group; fewest and most tokens."""
    launcher = launcher_of(tmp_path, FakeDriver(KINDS), SMALL, FITS)
    tried = [(t.geometry.hidden, t.geometry.intermediate, t.layout.tag, t.tokens) for t in trials(launcher, ROUTE)]
    tag = "tile32x8/4-byte/group-{}/interleaved/batched"
    assert tried == [
        (384, 64, tag.format(32), 2),
        (384, 64, tag.format(32), 8),
        (576, 128, tag.format(32), 2),
        (576, 128, tag.format(32), 8),
        (768, 128, tag.format(128), 2),
        (768, 128, tag.format(128), 8),
    ]


def test_every_kernel_is_tried(tmp_path: Path) -> None:
    """Where calls of some sizes take other kernels, each of them runs, with the most tokens it takes."""
    launcher = launcher_of(tmp_path, FakeDriver(KINDS), FITS, runtime="false")

    def steps(case: Case) -> tuple[Step, ...]:
        return (Step("source", "few" if case.tokens <= 4 else "many", grid=(1,)),)

    assert [trial.tokens for trial in trials(launcher, replace(ONLY_FITS, steps=steps))] == [2, 4, 8]


def test_without_a_runtime_version(tmp_path: Path) -> None:
    """Only what was specialised is tried."""
    launcher = launcher_of(tmp_path, FakeDriver(KINDS), FITS, runtime="false")
    assert {trial.geometry for trial in trials(launcher, ROUTE)} == {FITS}


def right(geometry: Geometry) -> Callable[[Launched, Mapping[int, Any]], None]:
    """A device that computes as the portable route does."""

    def compute(launched: Launched, memory: Mapping[int, Any]) -> None:
        tokens = int(launched.arguments[-1])
        out, inner = computed(Known.make(geometry, ROUTE.last).head(tokens), geometry)
        memory[int(launched.arguments[3])][...] = out
        memory[int(launched.arguments[4])][...] = inner

    return compute


def backend(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, route: Route = ROUTE) -> NativeBackend:
    monkeypatch.setattr("sm70_moe.kernels.native.backend.STEPS", {"grouped": route})
    made = NativeBackend("grouped")
    made._state.launchers["cuda:0"] = launcher
    return made


ONLY_FITS = replace(ROUTE, runs=decode(Span(2, 8), replace(READS, groups=frozenset({32}))))


def test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said where everything is right; absent planes are null."""
    driver = FakeDriver(KINDS, right(FITS))
    made = backend(launcher_of(tmp_path, driver, FITS, runtime="false"), monkeypatch, ONLY_FITS)
    assert made.self_test("cuda:0") == ""
    assert [(launched.stream, launched.arguments[-2:]) for launched in driver.launched] == [(0, (0, 2)), (0, (0, 8))]


def test_outputs_are_poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does nothing is found out, and the layer is named."""
    made = backend(launcher_of(tmp_path, FakeDriver(KINDS), FITS), monkeypatch)
    text = made.self_test("cuda:0")
    assert "not written" in text
    assert "hidden 384" in text
    assert not isinstance(text, Refusal)


def test_the_drivers_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told apart from a wrong answer, with the driver's own words."""
    driver = FakeDriver(KINDS, refuses="CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")
    text = backend(launcher_of(tmp_path, driver, FITS), monkeypatch).self_test("cuda:0")
    assert isinstance(text, Refusal)
    assert "no kernel image" in text


def test_dependent_launch_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain launch is tried then, and is what later calls do."""

    def compute(launched: Launched, memory: Mapping[int, Any]) -> None:
        if not launched.config.dependent:
            right(FITS)(launched, memory)

    driver = FakeDriver(KINDS, compute, name="sm_90")
    launcher = launcher_of(tmp_path, driver, FITS, runtime="false")
    made = backend(launcher, monkeypatch, ONLY_FITS)
    assert made._may_depend(launcher) is True
    assert made.self_test("cuda:0") == ""
    assert [launched.config.dependent for launched in driver.launched] == [True, False, False]
    assert made._may_depend(launcher) is False


@pytest.mark.parametrize(
    ("architecture", "wanted", "expected"), [("sm_70", True, False), ("sm_90", False, False), ("sm_100", True, True)]
)
def test_who_launches_dependently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, wanted: bool, expected: bool
) -> None:
    """From sm_90 on, unless the setting is off."""
    driver = FakeDriver(KINDS, right(FITS), name=architecture)
    launcher = launcher_of(tmp_path, driver, FITS, runtime="false")
    made = backend(launcher, monkeypatch, ONLY_FITS).configured(None, wanted)
    made._state.launchers["cuda:0"] = launcher
    assert made.self_test("cuda:0") == ""
    assert {launched.config.dependent for launched in driver.launched} == {expected}


def test_backend_without_kernels() -> None:
    """It says so, and names itself."""
    assert "unknown" in NativeBackend("unknown").self_test("cuda:0")


def test_a_self_test_runs_once_and_only_if_asked() -> None:
    """Results are kept; what nobody asks for does not run."""
    calls: list[str] = []

    def test(name: str) -> Callable[[], str]:
        return lambda: calls.append(name) or "wrong"  # type: ignore[func-returns-value]

    pending = Pending({("cuda:0", "qpn"): test("qpn"), ("cuda:0", "grouped"): test("grouped")})
    assert calls == []
    assert [pending.get(("cuda:0", "qpn")) for _ in range(3)] == ["wrong"] * 3
    assert pending.get(("cuda:1", "qpn")) is None
    assert calls == ["qpn"]
    assert len(pending) == 2
