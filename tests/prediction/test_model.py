"""The equations: what must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70_moe.prediction.hardware import GPUS
from sm70_moe.prediction.model import Setting, floor, parts_of, roofline
from sm70_moe.prediction.parameters import Fitted, Parameters
from sm70_moe.prediction.queue import flow_rate, steady
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.work import Work

V100 = GPUS["v100-sxm2-16"]
NUMBERS = Parameters(launch=0.6, reached=0.9, efficiency=0.7, serial=0.5, latency=2.0, hidden=0.5)

times = st.floats(0.01, 100)
counts = st.integers(1, 40)


@given(blocks=counts, resident=counts, streamed=times, issue=times, first=times, serial=st.floats(0, 1))
def test_overlap_is_between_its_limits(blocks, resident, streamed, issue, first, serial) -> None:
    """Never faster than the slower of the two, never slower than one after the other with every wait."""
    found = steady(blocks, resident, streamed, issue, first, serial)
    assert found >= max(streamed, issue) * (1 - 1e-9)
    assert found <= (streamed + issue + blocks * first) * (1 + 1e-9)


@given(resident=counts, streamed=times, issue=times, wait=times)
def test_more_resident_blocks_are_never_slower(resident, streamed, issue, wait) -> None:
    """And no throughput is above that of the slower station."""
    rate = flow_rate(resident, streamed, issue, wait)
    assert rate <= flow_rate(resident + 1, streamed, issue, wait) * (1 + 1e-9)
    assert rate <= 1 / max(streamed, issue) * (1 + 1e-9)


def test_a_lone_block_waits_for_everything() -> None:
    """One resident block: the sum of its times."""
    assert flow_rate(1, 2.0, 3.0, 5.0) == pytest.approx(0.1)


def work(volta: ReadBuild, call, tokens: int) -> tuple[Work, ...]:
    return volta.works(call(tokens), "sm_70")


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(1, 8), more=st.floats(1.0, 3.0))
def test_more_is_never_faster(volta: ReadBuild, call, tokens: int, more: float) -> None:
    """Bytes and instructions up, clock and bandwidth down: each makes every kernel slower or leaves it."""
    setting = Setting.likely(V100, NUMBERS)
    for one in work(volta, call, tokens):
        usual = parts_of(one, setting).total
        larger = replace(one, bytes=one.bytes * more)
        busier = replace(one, instructions={pipe: n * more for pipe, n in one.instructions.items()})
        slower = replace(setting, clock=setting.clock / more)
        narrower = replace(setting, reached=setting.reached / more)
        assert parts_of(larger, setting).total >= usual
        assert parts_of(busier, setting).total >= usual
        assert parts_of(one, slower).total >= usual
        assert parts_of(one, narrower).total >= usual


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(1, 8),
    efficiency=st.floats(0.15, 1),
    serial=st.floats(0, 1),
    latency=st.floats(0.3, 3),
)
def test_never_below_the_floor(volta: ReadBuild, call, tokens, efficiency, serial, latency) -> None:
    """No parameters make a kernel faster than its bytes, nor than the same bytes with nothing done to them."""
    numbers = replace(NUMBERS, efficiency=efficiency, serial=serial, latency=latency)
    setting = Setting.likely(V100, numbers)
    for one in work(volta, call, tokens):
        total = parts_of(one, setting).total
        assert total > floor(one, V100)
        assert total >= roofline(one, setting).total * (1 - 1e-9)


@pytest.mark.parametrize(("tokens", "nominal"), [(1, 8.5), (4, 33), (8, 64)])
def test_floors_are_those_of_perf(volta: ReadBuild, call, tokens: int, nominal: float) -> None:
    """7.68 MB, 29.8 MB and 57.4 MB at 900 GB/s."""
    assert sum(floor(one, V100) for one in work(volta, call, tokens)) == pytest.approx(nominal, rel=0.01)


def test_facts_win_over_fitted_numbers(fitted: Fitted) -> None:
    """A V100's bandwidth and launches are its own; efficiency comes from the H200."""
    setting = Setting.likely(V100, fitted.parameters)
    assert (setting.reached, setting.launch) == (822, 1.2)
    assert setting.efficiency == fitted.parameters.efficiency
    own = Setting.likely(GPUS["h200"], fitted.parameters)
    assert own.reached == pytest.approx(4800 * fitted.parameters.reached)


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_facts_are_ranges(gpu: str) -> None:
    """Low, likely and high in this order, and no bandwidth above the nominal."""
    found = GPUS[gpu]
    for known in (found.clock, found.l2_latency, found.dram_latency, found.reached, found.launch):
        assert known is None or known.low <= known.likely <= known.high
    assert 0 <= found.arrival.low <= found.arrival.likely <= found.arrival.high
    assert 1 < found.trips.low <= found.trips.likely <= found.trips.high
    assert found.reached is None or found.reached.high <= found.bandwidth
