"""One token in one launch: its step and grid, what fits at once, its self-test, and which layers get it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import SOURCES
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.build.versions import Scope, versions
from sm70_moe.kernels.declared import FUSED
from sm70_moe.kernels.native.answers import Known
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.launch import Launcher, Step
from sm70_moe.kernels.native.residency import Residency
from sm70_moe.kernels.native.steps import BARRIER, STEPS, Case, fused, fused_rounds, fused_with
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.testing.driver import FakeDriver, Launched

MANIFESTS = load_manifests(SOURCES)
KERNEL = MANIFESTS["decode_fused"].kernels["fused_1"]
KINDS = {"fused_1": tuple(argument.kind for argument in KERNEL.arguments)}
PLACES = {argument.name: place for place, argument in enumerate(KERNEL.arguments)}

FIRST = Geometry(hidden=2560, intermediate=160, experts=512, top_k=10, group=32)
SMALL = Geometry(hidden=256, intermediate=64, experts=8, top_k=4, group=32)
LAYOUT = BankLayout("octet32", Metadata.FOUR_BYTE, 32, True, True)


def case(geometry: Geometry = FIRST, metadata: Metadata = Metadata.FOUR_BYTE) -> Case:
    shape = BankShape(geometry.experts, geometry.hidden, geometry.intermediate)
    return Case(shape, replace(LAYOUT, metadata=metadata), geometry.top_k, 1, "sm_70", False)


def launcher_of(folder: Path, driver: FakeDriver, *geometries: Geometry) -> Launcher:
    """Images that hold nothing, of every version of the source."""
    scope = Scope(("sm_70",), geometries)
    contents = dict.fromkeys(versions([MANIFESTS["decode_fused"]], scope), b"code")
    return Launcher(Cubins.write(folder, "id", "compiler", scope, contents), MANIFESTS, 0, driver)


def backend_of(launcher: Launcher) -> NativeBackend:
    made = NativeBackend("qpn", fused=True)
    made._state.launchers["cuda:0"] = launcher
    return made


@pytest.mark.parametrize(
    ("geometry", "blocks"),
    [
        (FIRST, 400),  # W13: 10 slots x 40 octets; W2: 320
        (Geometry(2048, 128, 512, 10, 32), 320),  # W13: 10 x 32; W2: 256
        (Geometry(2048, 192, 128, 8, 32), 384),  # W13: 8 x 48; W2: 256
        (Geometry(4096, 32, 8, 2, 32), 512),  # W13: 2 x 8; W2: 512
        (Geometry(16384, 32768, 8, 16, 32), 65_535),  # W13: 16 x 8,192, more than arrivals can be counted
    ],
)
def test_a_block_for_each_task(geometry: Geometry, blocks: int) -> None:
    """Of W13 or of W2, whichever has more; as one cooperative launch without a step behind it."""
    axes = {"metadata": "4-byte"}
    assert fused(case(geometry)) == (Step("decode_fused", "fused_1", grid=(blocks,), axes=axes, cooperative=True),)


def test_the_self_tests_rounds() -> None:
    """Two calls alike, then other grids with the usual one between."""
    assert [steps[0].grid[0] for steps in fused_rounds(case())] == [400, 400, 7, 400, 1, 400]


def test_versions_are_few() -> None:
    """No version for any geometry, one order, no 2.5-byte metadata: half of what two launches have."""
    found = versions([MANIFESTS["decode_fused"]], Scope(("sm_70", "sm_90"), (FIRST, SMALL)))
    assert len(found) == 2 * 2 * 2
    assert {dict(version.axes)["metadata"] for version in found} == set(STEPS[FUSED].runs.reads.metadata)
    assert STEPS[FUSED].runs.reads.metadata == {"4-byte", "3-byte"}
    assert STEPS[FUSED].runs.reads.orders == {"octet32"}


@pytest.mark.parametrize(
    ("holds", "blocks"),
    [
        (Residency(True, 80, 5), 400),
        (Residency(True, 132, 4), 400),
        (Residency(True, 80, 3), 240),
        (Residency(True, 1, 1), 1),
    ],
)
def test_no_more_blocks_than_fit(tmp_path: Path, holds: Residency, blocks: int) -> None:
    """Those that there are share the tasks out; a grid that is smaller stays as it is."""
    driver = FakeDriver(KINDS, holds=holds)
    launcher = launcher_of(tmp_path, driver, FIRST)
    values = dict.fromkeys(PLACES, 0)
    for steps in (fused(case()), fused_with(case(), 1)):
        launcher.program(steps, values=values, sizes=FIRST.record())(0)
    assert [launched.config.grid for launched in driver.launched] == [(blocks, 1, 1), (1, 1, 1)]
    assert all(launched.config.cooperative for launched in driver.launched)


@pytest.mark.parametrize("holds", [Residency(False, 80, 5), Residency(True, 80, 0)])
def test_a_device_that_cannot(tmp_path: Path, holds: Residency) -> None:
    """Without cooperative launch or room for a block no program is made."""
    launcher = launcher_of(tmp_path, FakeDriver(KINDS, holds=holds), FIRST)
    with pytest.raises(BackendError, match="fused_1"):
        launcher.program(fused(case()), values=dict.fromkeys(PLACES, 0), sizes=FIRST.record())


def test_a_grid_of_two_sizes_is_cut_in_the_first(tmp_path: Path) -> None:
    """Whole rows of blocks only."""
    driver = FakeDriver(KINDS, holds=Residency(True, 80, 1))
    launcher = launcher_of(tmp_path, driver, FIRST)
    step = replace(fused(case())[0], grid=(40, 10))
    launcher.program([step], values=dict.fromkeys(PLACES, 0), sizes=FIRST.record())(0)
    assert driver.launched[0].config.grid == (8, 10, 1)


def right(known: Known, wrong_from: int = 0) -> Callable[[Launched, Mapping[int, Any]], None]:
    """A device that writes the right answer, and from a call on the wrong one; counts calls in the scratch."""

    def compute(launched: Launched, memory: Mapping[int, Any]) -> None:
        at = {name: int(launched.arguments[place]) for name, place in PLACES.items()}
        memory[at["scratch"]][0] += 1
        calls = int(memory[at["scratch"]][0])
        factor = 2 if wrong_from and calls >= wrong_from else 1
        memory[at["intermediate"]][...] = known.answer.activations.astype(np.float16)
        memory[at["out"]][...] = (known.answer.out * factor).astype(np.float16)

    return compute


def test_the_self_test_calls_six_times_on_one_scratch(tmp_path: Path) -> None:
    """For each kind of metadata: usual, usual, 7 blocks, usual, 1 block, usual, all judged."""
    driver = FakeDriver(KINDS, right(Known.make(SMALL, 1)))
    assert backend_of(launcher_of(tmp_path, driver, SMALL)).self_test("cuda:0") == ""
    tasks = 64  # 4 slots x 16 octets of W13, 32 tasks of W2
    assert [launched.config.grid[0] for launched in driver.launched] == [tasks, tasks, 7, tasks, 1, tasks] * 2
    scratch = [launched.arguments[PLACES["scratch"]] for launched in driver.launched]
    assert len(set(scratch[:6])) == 1
    assert not any(launched.config.dependent for launched in driver.launched)


@pytest.mark.parametrize("wrong_from", [1, 2, 3, 6])
def test_the_self_test_sees_a_later_call_go_wrong(tmp_path: Path, wrong_from: int) -> None:
    """A barrier that works once only is not enough; the text says which call."""
    driver = FakeDriver(KINDS, right(Known.make(SMALL, 1), wrong_from))
    text = backend_of(launcher_of(tmp_path, driver, SMALL)).self_test("cuda:0")
    assert f"call {wrong_from}" in text
    assert len(driver.launched) == wrong_from


def test_the_self_test_says_what_the_device_lacks(tmp_path: Path) -> None:
    """It does not launch then."""
    driver = FakeDriver(KINDS, holds=Residency(False, 80, 5))
    text = backend_of(launcher_of(tmp_path, driver, SMALL)).self_test("cuda:0")
    assert "cooperative" in text
    assert driver.launched == []


def test_residency_is_that_of_the_worst_kernel(tmp_path: Path) -> None:
    """Over all geometries and kinds of metadata of the build."""

    class Uneven(FakeDriver):
        asked = 0

        def residency(self, device: int, kernel: object, threads: int, shared: int) -> Residency:
            Uneven.asked += 1
            return Residency(True, 80, 7 - Uneven.asked)

    made = backend_of(launcher_of(tmp_path, Uneven(KINDS), SMALL, FIRST))
    assert made.residency("cuda:0") == Residency(True, 80, 3)
    assert Uneven.asked == 4


def test_residency_that_nobody_can_tell(tmp_path: Path) -> None:
    """Without a build, and with one that has no kernel for the device, a text says so."""
    assert isinstance(NativeBackend("qpn", folder=tmp_path, fused=True).residency("cuda:0"), str)
    assert isinstance(backend_of(launcher_of(tmp_path, FakeDriver(KINDS))).residency("cuda:0"), str)


def test_options_of_backends() -> None:
    """Only `qpn` has it; the other way of running is made once, and leads back."""
    plain = NativeBackend("qpn")
    assert plain.options == {FUSED}
    assert NativeBackend("grouped").options == frozenset()
    other = plain.with_options({FUSED})
    assert (other.fused, other.route) == (True, STEPS[FUSED])
    assert plain.with_options({FUSED}) is other
    assert other.with_options({FUSED, "another"}) is other
    assert plain.with_options({"another"}) is plain
    assert (plain.fused, plain.route) == (False, STEPS["qpn"])
    assert other.with_options(frozenset()) is plain


def test_configured() -> None:
    """Benchmarks ask for it directly; another backend refuses, naming itself and the option."""
    made = NativeBackend("qpn").configured(None, True, fused=True)
    assert made.fused
    assert made.configured(None, True).fused is False
    with pytest.raises(BackendError, match=f"grouped.*{FUSED}"):
        NativeBackend("grouped").configured(None, True, fused=True)


def test_scratch_counts_the_barrier() -> None:
    """Beside the activations, and only where it is used."""
    shape = BankShape(512, 2560, 160)
    plain, other = NativeBackend("qpn"), NativeBackend("qpn", fused=True)
    assert plain.workspace(shape, 10, 1) == 3_584  # 10 * 160 * 2 in whole blocks of 512
    assert BARRIER <= other.workspace(shape, 10, 1) - plain.workspace(shape, 10, 1) == 512
    assert other.workspace(shape, 10, 0) == 0
