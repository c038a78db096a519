"""The range of a prediction: a fixed sample of everything that is not known exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sm70_moe.prediction.hardware import Gpu, Range
from sm70_moe.prediction.model import Setting, floor, parts_of
from sm70_moe.prediction.parameters import Fitted
from sm70_moe.prediction.work import Work

SEED = 70
SAMPLES = 1000
SIDES = (5, 95)
"""Percentiles of the sample that are called low and high."""

CARRIED = Range(0.75, 1.0, 1.2)
"""How far efficiency and the factor on latencies carry over from one architecture to another. Assumed."""


def settings(gpu: Gpu, fitted: Fitted) -> Iterator[tuple[Setting, float]]:
    """Settings drawn from the ranges of the facts, each with the model's own error as a factor."""
    source, other = np.random.default_rng(SEED), np.random.default_rng((SEED, 1))
    likely = Setting.likely(gpu, fitted.parameters)

    def draw(known: Range | None, value: float, source: np.random.Generator = source) -> float:
        if known is None or known.low == known.high:
            return value
        return float(source.triangular(known.low, known.likely, known.high))

    for _ in range(SAMPLES):
        setting = Setting(
            gpu=gpu,
            clock=draw(gpu.clock, likely.clock),
            reached=draw(gpu.reached, likely.reached),
            launch=draw(gpu.launch, likely.launch),
            l2_cycles=draw(gpu.l2_latency, likely.l2_cycles),
            dram_cycles=draw(gpu.dram_latency, likely.dram_cycles),
            efficiency=min(1.0, likely.efficiency * draw(CARRIED, 1.0)),
            serial=float(source.triangular(0.0, min(max(likely.serial, 1e-6), 1 - 1e-6), 1.0)),
            latency=likely.latency * draw(CARRIED, 1.0),
            trips=draw(gpu.trips, likely.trips, other),  # apart: times of two launches do not depend on it
            arrival=draw(gpu.arrival, likely.arrival, other),
        )
        yield setting, float(np.exp(source.normal(0.0, fitted.spread)))


def time_range(works: Sequence[Work], gpu: Gpu, fitted: Fitted) -> Range:
    """Microseconds of a layer. Never below the bytes at the nominal bandwidth; the likely value lies inside."""
    return range_of(lambda setting: layer_time(works, setting), works, gpu, fitted)


def range_of(time: Callable[[Setting], float], works: Sequence[Work], gpu: Gpu, fitted: Fitted) -> Range:
    """Range of a time that reads these bytes: never below them."""
    found = sampled(time, gpu, fitted)
    least = sum(floor(work, gpu) for work in works)
    return Range(*(max(least, value) for value in (found.low, found.likely, found.high)))


def sampled(number: Callable[[Setting], float], gpu: Gpu, fitted: Fitted) -> Range:
    """Range of anything in microseconds that follows from a setting; the likely value lies inside."""
    likely = number(Setting.likely(gpu, fitted.parameters))
    sample = [number(setting) * factor for setting, factor in settings(gpu, fitted)]
    low, high = (float(value) for value in np.percentile(sample, SIDES))
    return Range(min(low, likely), likely, max(high, likely))


def layer_time(works: Sequence[Work], setting: Setting) -> float:
    return sum(parts_of(work, setting).total for work in works)
