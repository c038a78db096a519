"""One token in one launch: its machine code, its equations, and what they must never say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode.pipes import Pipe
from sm70_moe.prediction.comparison import compare
from sm70_moe.prediction.fit import points_of, with_checks
from sm70_moe.prediction.forecast import forecast
from sm70_moe.prediction.fused import Fused, barrier, fused_parts
from sm70_moe.prediction.hardware import GPUS, Range
from sm70_moe.prediction.measurements import Measured, Run
from sm70_moe.prediction.model import Setting, floor, parts_of
from sm70_moe.prediction.parameters import Fitted, Parameters, load_fitted
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.spread import layer_time

V100, H200 = GPUS["v100-sxm2-16"], GPUS["h200"]
NUMBERS = Parameters(launch=0.6, reached=0.9, efficiency=0.7, serial=0.5, latency=2.0, hidden=0.5)


@pytest.fixture(scope="session")
def fused(volta_fused: ReadBuild, call) -> Fused:
    return volta_fused.fused(call(1), V100)


def test_first_contract_on_a_v100(fused: Fused) -> None:
    """A block for each task of W13, five on each multiprocessor, and for 320 of them one of W2."""
    assert (fused.first.blocks, fused.second.blocks) == (400, 320)
    assert (fused.blocks, fused.resident, fused.warps) == (400, 5, 6)
    assert (fused.first.warps, fused.second.warps) == (5, 6)
    assert [fused.tasks_each(work) for work in fused.works] == [1, 1]
    assert (fused.first.registers, fused.first.bytes, fused.second.bytes) == (64, 5_120_000, 2_560_000)


def test_first_contract_on_an_h200(hopper_fused: ReadBuild, call) -> None:
    """Not more blocks than tasks, though more would fit."""
    found = hopper_fused.fused(call(1), H200)
    assert (found.blocks, found.warps, found.first.warps, found.second.warps) == (400, 7, 5, 7)
    assert found.resident * 132 >= 400


@pytest.mark.parametrize(("architecture", "gpu", "each"), [("sm_70", V100, 8), ("sm_90", H200, 1)])
def test_tensor_steps_are_those_of_the_products(volta_fused, hopper_fused, call, architecture, gpu, each) -> None:
    """W13 has none too many; places of W2 that have nothing to do are 44 % on sm_70, 12 % on sm_90."""
    build = volta_fused if architecture == "sm_70" else hopper_fused
    found = build.fused(call(1), gpu)
    assert found.first.instructions[Pipe.TENSOR] == 80 * 400 * each
    needed = 10 * 5 * 320 * each
    assert needed <= found.second.instructions[Pipe.TENSOR] <= 1.44 * needed


def test_instructions_are_about_those_of_two_launches(volta_fused: ReadBuild, call, fused: Fused) -> None:
    """The bodies are the same: 15 % apart at most, and no more than both with what stands around the loops."""
    two = volta_fused.works(call(1), "sm_70")
    for one, other in zip(fused.works, two, strict=True):
        assert one.slots == pytest.approx(other.slots, rel=0.15)


def test_fewer_resident_blocks_take_several_tasks(volta_fused: ReadBuild, call, fused: Fused) -> None:
    """Forty multiprocessors hold 200 blocks; each goes round twice, and W2's second task was not asked for ahead."""
    small = replace(V100, multiprocessors=40)
    found = volta_fused.fused(call(1), small)
    assert (found.blocks, found.tasks_each(found.first), found.tasks_each(found.second)) == (200, 2, 2)
    assert found.first.slots < fused.first.slots  # what stands around the loops runs for fewer blocks
    assert found.first.instructions[Pipe.TENSOR] == fused.first.instructions[Pipe.TENSOR]
    usual, parts = (fused_parts(each, Setting.likely(gpu, NUMBERS)) for each, gpu in ((fused, V100), (found, small)))
    assert parts.total > usual.total


def test_wait_is_the_longer_of_barrier_and_first_touch(fused: Fused) -> None:
    """A slow barrier hides the first touch, and weights stream meanwhile; a fast one is hidden itself."""
    setting = Setting.likely(V100, NUMBERS)
    slow, fast = (fused_parts(fused, replace(setting, trips=trips)) for trips in (20.0, 0.0))
    drained = setting.microseconds(setting.l2_cycles)
    assert slow.wait == pytest.approx(slow.barrier + drained)
    assert slow.ahead == pytest.approx(min(slow.second.bytes, slow.wait - slow.second.first))
    assert fast.wait == fast.second.first
    assert fast.ahead == 0


def test_barrier_costs_trips_and_arrivals(fused: Fused) -> None:
    """By hand: 2 x 3.5 x 212 cycles and 400 arrivals at 1.5 GHz."""
    assert barrier(400, Setting.likely(V100, NUMBERS)) == pytest.approx((2 * 3.5 * 212 + 400) / 1500)


grown = st.floats(1.0, 4.0)


@settings(deadline=None, max_examples=60)
@given(
    more=grown,
    latency=st.floats(0.3, 3),
    serial=st.floats(0, 1),
    efficiency=st.floats(0.15, 1),
    trips=st.floats(0, 12),
    multiprocessors=st.sampled_from([20, 33, 60, 80]),
)
def test_more_is_never_faster(volta_fused, call, more, latency, serial, efficiency, trips, multiprocessors) -> None:
    """Bytes, instructions, trips, arrivals and launches up, clock and bandwidth down; also with tasks to share out."""
    gpu = replace(V100, multiprocessors=multiprocessors)
    fused = volta_fused.fused(call(1), gpu)
    numbers = replace(NUMBERS, latency=latency, serial=serial, efficiency=efficiency)
    setting = replace(Setting.likely(gpu, numbers), trips=trips)
    usual = fused_parts(fused, setting).total * (1 - 1e-9)
    changed = [
        replace(setting, trips=trips * more),
        replace(setting, arrival=setting.arrival * more),
        replace(setting, launch=setting.launch * more),
        replace(setting, clock=setting.clock / more),
        replace(setting, reached=setting.reached / more),
    ]
    assert all(fused_parts(fused, each).total >= usual for each in changed)
    for name in ("first", "second"):
        work = getattr(fused, name)
        busier = replace(work, instructions={pipe: n * more for pipe, n in work.instructions.items()})
        for heavier in (replace(work, bytes=work.bytes * more), busier):
            assert fused_parts(replace(fused, **{name: heavier}), setting).total >= usual


@settings(deadline=None, max_examples=60)
@given(
    latency=st.floats(0.3, 3),
    serial=st.floats(0, 1),
    efficiency=st.floats(0.15, 1),
    trips=st.floats(0, 100),
    launch=st.floats(0.2, 3),
)
def test_never_below_the_floor_and_no_miracle(volta_fused, call, fused, latency, serial, efficiency, trips, launch):
    """No parameters make it faster than its bytes, or save more than what two launches cost beside their work."""
    numbers = replace(NUMBERS, latency=latency, serial=serial, efficiency=efficiency)
    setting = replace(Setting.likely(V100, numbers), trips=trips, launch=launch)
    total = fused_parts(fused, setting).total
    assert total > sum(floor(work, V100) for work in fused.works)
    two = volta_fused.works(call(1), "sm_70")
    fixed = sum(p.launch + p.first + p.tail for p in (parts_of(work, setting) for work in two))
    assert layer_time(two, setting) - total <= fixed


def test_range(volta_fused: ReadBuild, fitted: Fitted, call) -> None:
    """Floor, low, likely and high; what is saved lies in its range and within a launch and a first touch."""
    made = forecast(volta_fused, call(1), V100, fitted)
    assert made.fused is not None
    assert made.missing == ""
    time, saved = made.fused.time, made.fused.saved
    assert made.nominal < time.low < time.likely < time.high
    assert saved.low < saved.likely < saved.high
    assert saved.likely == pytest.approx(made.time.likely - time.likely)
    assert saved.high < 2 * (V100.launch.high + made.parts[1].first)


def test_two_launches_do_not_depend_on_the_barrier(volta_fused: ReadBuild, fitted: Fitted, call) -> None:
    """Its facts are drawn apart from the others."""
    slow = replace(V100, trips=Range(10, 11, 12))
    usual, other = (forecast(volta_fused, call(1), gpu, fitted) for gpu in (V100, slow))
    assert usual.time == other.time
    assert other.fused.time.likely > usual.fused.time.likely
    assert other.fused.saved.likely < usual.fused.saved.likely


@pytest.mark.parametrize("tokens", [2, 8])
def test_more_tokens_have_no_such_kernel(volta_fused: ReadBuild, fitted: Fitted, call, tokens: int) -> None:
    """And nothing is said of it."""
    made = forecast(volta_fused, call(tokens), V100, fitted)
    assert made.fused is None
    assert "fused_decode" not in made.record()


@pytest.mark.parametrize(("metadata", "named"), [("3-byte", "decode_fused"), ("2.5-byte", "2.5-byte")])
def test_versions_that_are_missing_are_named(volta_fused: ReadBuild, call, metadata: str, named: str) -> None:
    """One that the build lacks, and one that there is none of."""
    with pytest.raises(BackendError, match=named):
        volta_fused.fused(call(1, metadata), V100)


def test_build_without_it(volta: ReadBuild, fitted: Fitted, call) -> None:
    """Two launches are predicted all the same, and the reason stands in the record."""
    made = forecast(volta, call(1), V100, fitted)
    assert made.fused is None
    assert made.time.likely > 0
    assert "decode_fused" in made.record()["missing"]


ROW = Measured("fused", "plain", "both", "4-byte", 1, "uniform", 10.0, 20.0)


def test_rows_of_an_h200_are_a_check(run: Run, hopper, hopper_fused: ReadBuild, fitted: Fitted, call) -> None:
    """Fitted numbers stay as they are; the error beside them is the model's over the measurement."""
    more = replace(run, rows=(*run.rows, ROW))
    geometry = call(1).geometry
    assert points_of(more, hopper, geometry, H200) == points_of(run, hopper, geometry, H200)
    made = with_checks(fitted, more, hopper_fused, geometry, H200)
    assert replace(made, checks={}) == fitted
    time = fused_parts(hopper_fused.fused(call(1), H200), Setting.likely(H200, fitted.parameters)).total
    assert made.checks == {ROW.name: pytest.approx((time + run.separator(ROW)) / 20.0 - 1, abs=1e-4)}


def test_no_rows_no_check(run: Run, hopper: ReadBuild, fitted: Fitted, call) -> None:
    """Then a build does not need the kernel; with a row it does."""
    assert with_checks(fitted, run, hopper, call(1).geometry, H200).checks == {}
    with pytest.raises(BackendError, match="decode_fused"):
        with_checks(fitted, replace(run, rows=(*run.rows, ROW)), hopper, call(1).geometry, H200)


def test_files_from_before_have_no_checks(fitted: Fitted) -> None:
    """They are read as they were."""
    record = fitted.record()
    del record["checks"]
    assert Fitted.of_record(record) == fitted
    assert isinstance(load_fitted().checks, dict)


def test_a_v100s_row_is_compared(volta: ReadBuild, volta_fused: ReadBuild, fitted: Fitted, call) -> None:
    """With the range of one launch; where the build lacks the kernel the other rows are compared all the same."""
    two = replace(ROW, arm="ours")
    run = Run("Tesla V100-SXM2-16GB", "b", "p", "test", "", (two, ROW))
    found = compare(run, volta_fused, call(1).geometry, V100, fitted)
    made = forecast(volta_fused, call(1), V100, fitted)
    assert [each.predicted for each in found.rows] == [made.time, made.fused.time]
    assert (found.missing, found.outside) == ((), ())
    without = compare(run, volta, call(1).geometry, V100, fitted)
    assert [each.row.arm for each in without.rows] == ["ours"]
    assert ROW.name in without.missing[0]
    with pytest.raises(BackendError, match="decode_fused"):
        compare(replace(run, rows=(ROW,)), volta, call(1).geometry, V100, fitted)
