"""Did what was timed compute the right thing? A time of a wrong result is no time."""

from __future__ import annotations

import torch

from sm70_moe.benchmark.arms import Arm, Ready
from sm70_moe.benchmark.stand import Stand
from sm70_moe.benchmark.timing import Stopwatch, Work
from sm70_moe.evidence.trial import Trial, same_bits
from sm70_moe.timings import RIGHT, UNJUDGED, WRONG

FACTOR = 2.0
"""Tensor cores need not round to nearest."""

ROWS = 4
"""Rows of a call that are judged: the reference decodes each of their experts on the host."""


def verdict(stand: Stand, arm: Arm, ready: Ready, layers: int, again: Work, watch: Stopwatch) -> str:
    """Run everything once more as it was timed, on poisoned outputs, and look at what the last layer left.

    Finite outputs, the separating kernel's ids, the bits of a call outside of the graph, and the bounds of
    the FP64 reference.
    """
    stand.poison(*ready.outputs)
    again()
    watch.wait()
    last = layers - 1
    if not stand.separated(last, arm.distinct):
        return f"{WRONG}: the separating kernel did not write the last layer's ids"
    if lost := sum(int((~torch.isfinite(output)).sum()) for output in ready.outputs):
        return f"{WRONG}: {lost} numbers were not written, or are not finite"
    if ready.run is None:
        return UNJUDGED
    timed, call = stand.out.clone(), stand.inputs(last)
    width = stand.setup.shape.intermediate
    trial = Trial(arm.name, arm.name, ready.run, stand.setup.reference(last), width, FACTOR, ROWS)
    if not same_bits(timed, trial.once(call, export=False)[0]):
        return f"{WRONG}: other bits than the same call by itself"
    found = trial.judge(call)
    if not found.ok:
        return (
            f"{WRONG}: bound fractions W13 {found.w13:.3g}, W2 {found.w2:.3g}, sum {found.out:.3g} (at most 1), "
            f"finite {found.finite}, repeatable {found.repeatable}"
        )
    return RIGHT
