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
"""Rows of a call that are judged at most: the reference decodes each of their experts on the host."""

MOST_WEIGHTS = 1 << 26
"""Weights that are decoded for them; a single row may have more. Decoding takes about 20 ns each."""


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
    trial = Trial(arm.name, arm.name, ready.run, stand.setup.reference(last), width, FACTOR, rows_of(stand))
    if not same_bits(timed, trial.once(call, export=False)[0]):
        return f"{WRONG}: other bits than the same call by itself"
    if any(same_bits(timed, right) for right in stand.right.get(last, ())):
        return RIGHT  # the bits of an arm that was judged, as those of plain and dependent launch are
    found = trial.judge(call)
    if not found.ok:
        return (
            f"{WRONG}: bound fractions W13 {found.w13:.3g}, W2 {found.w2:.3g}, sum {found.out:.3g} (at most 1), "
            f"finite {found.finite}, repeatable {found.repeatable}"
        )
    stand.right.setdefault(last, []).append(timed)
    return RIGHT


def rows_of(stand: Stand) -> int:
    """Rows of a call that are judged."""
    shape = stand.setup.shape
    weights = 3 * shape.hidden * shape.intermediate * stand.setup.top_k
    return max(1, min(ROWS, MOST_WEIGHTS // weights))
