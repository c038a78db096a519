"""Samples from a stopwatch and a clock that are told what to say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sm70_moe.benchmark.protocol import Protocol
from sm70_moe.benchmark.timing import eagerly, host_time, in_graphs, shares
from sm70_moe.errors import SettingsError


class Watch:
    """Counts what is captured and replayed; a call of `elapsed` takes 100 us, 200 us, ..."""

    def __init__(self) -> None:
        self.captured = self.timed = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        self.captured += 1
        return work

    def elapsed(self, work: Callable[[], None]) -> float:
        work()
        self.timed += 1
        return 100.0 * self.timed

    def wait(self) -> None:
        pass


def test_in_graphs() -> None:
    """Samples are microseconds a layer, spread over the captures; warm replays come first."""
    watch, layers = Watch(), []
    timing = in_graphs(watch, layers.append, 5, Protocol(samples=7, captures=3, replays=2, warm=1))
    assert watch.captured == 3
    assert timing.samples == (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0)
    assert layers == [0, 1, 2, 3, 4] * (3 + 3 + 7 * 2)
    timing.again()
    assert layers[-5:] == [0, 1, 2, 3, 4]


def test_eagerly() -> None:
    """The same without a graph."""
    watch, layers = Watch(), []
    timing = eagerly(watch, layers.append, 2, Protocol(samples=7, replays=5))
    assert watch.captured == 0
    assert timing.samples[:2] == (10.0, 20.0)
    assert len(layers) == 2 + 7 * 5 * 2


@pytest.mark.parametrize(
    ("count", "parts", "found"), [(9, 3, [3, 3, 3]), (7, 3, [3, 2, 2]), (2, 5, [1, 1]), (7, 1, [7])]
)
def test_shares(count: int, parts: int, found: list[int]) -> None:
    """None empty, all together the count."""
    assert list(shares(count, parts)) == found


@pytest.mark.parametrize(("seconds", "calls"), [(1e-5, 200), (0.01, 20), (1.0, 3)])
def test_host_time(seconds: float, calls: int) -> None:
    """Fewer calls a batch of what is slow; five batches; the queue is empty before each."""
    now, done = [0.0], []

    def call() -> None:
        now[0] += seconds
        done.append("call")

    found = host_time(call, lambda: done.append("wait"), lambda: now[0])
    assert found == pytest.approx([seconds * 1e6] * 5)
    assert done.count("call") == 1 + 5 * calls
    assert done[:3] == ["call", "wait", "wait"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tokens": (0,)}, "64"),
        ({"tokens": (65,)}, "65"),
        ({"metadata": ("5-byte",)}, "'5-byte'"),
        ({"routings": ("zipf",)}, "'zipf'"),
        ({"samples": 6}, "at least 7"),
        ({"banks": 1}, "at least 2"),
    ],
)
def test_protocols_that_are_none(changes: dict, word: str) -> None:
    """What is not accepted is named, with what is."""
    with pytest.raises(SettingsError, match=word):
        Protocol(**changes)
