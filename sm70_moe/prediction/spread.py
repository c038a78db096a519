"""The range of a prediction: a fixed sample of everything that is not known exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    source = np.random.default_rng(SEED)
    likely = Setting.likely(gpu, fitted.parameters)

    def draw(known: Range | None, value: float) -> float:
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
        )
        yield setting, float(np.exp(source.normal(0.0, fitted.spread)))


def time_range(works: Sequence[Work], gpu: Gpu, fitted: Fitted) -> Range:
    """Microseconds of a layer. Never below the bytes at the nominal bandwidth; the likely value lies inside."""
    likely = layer_time(works, Setting.likely(gpu, fitted.parameters))
    sample = [layer_time(works, setting) * factor for setting, factor in settings(gpu, fitted)]
    low, high = (float(value) for value in np.percentile(sample, SIDES))
    least = sum(floor(work, gpu) for work in works)
    return Range(max(least, min(low, likely)), max(least, likely), max(least, high, likely))


def layer_time(works: Sequence[Work], setting: Setting) -> float:
    return sum(parts_of(work, setting).total for work in works)
