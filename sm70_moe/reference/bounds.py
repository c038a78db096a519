"""How far a route's result may lie from the FP64 reference (CONTRACT 9).

A **bound fraction** is the largest |error| / bound over all elements; a right route stays at or
below 1. Everything is derived from u = 2**-24, the unit roundoff of FP32:

- A dot product of K terms in FP32, in any order, is off by at most gamma_K * sum |a||w|, with
  gamma_K = K * u / (1 - K * u). Hardware that does not round to nearest has twice that u (`factor`).
- Rounding the result to its format adds half a unit in the last place (ulp), taken at the largest
  magnitude that the unrounded value can have.
- 2**-25 is added once to each judged result, and no bound is below 2**-24: relative bounds mean
  nothing among FP16's subnormals.

W2 is judged slot by slot against the exact product of the *route's own* intermediate, so that an
error is counted where it was made: half ulp + 2**-25 + gamma_I * sum |a||w|.

W13 is judged on the activations that it ends in, against silu(G) * U with exact G and U. The gate
and the up value are each off by d = gamma_H * sum |x||w| + half ulp. (Half an ulp each and not a
comparison with rounded values: near a tie two right routes round differently.) To first order

    d_silu = |silu'(G)| * d_gate + 8 u |silu(G)| + half ulp of silu
    d      = |U| * d_silu + |silu(G)| * d_up + d_silu * d_up + half ulp of the product + 2**-25

where 8 u allows for the exp, the addition and the division in FP32. The sum over the slots is
judged on the route's own slots: half ulp + 2**-25 + gamma_k * sum |weight||slot|. Slots that were
not rounded each on their own give another sum, and that is seen here.

An element that is NaN or infinite on one side only, or infinite with another sign, counts as an
infinite fraction, except where the bound reaches across the format's overflow threshold, so that
both answers are right. A slot with an invalid id must be exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70_moe.reference.arithmetic import Answer, combine, silu
from sm70_moe.reference.rounding import Floats, Format, widen

UNIT = 2.0**-24
"""Unit roundoff of FP32."""

SLACK = 2.0**-25
FLOOR = 2.0**-24
SILU_UNITS = 8

Mask = NDArray[np.bool_] | np.bool_


@dataclass(frozen=True, slots=True)
class Judgement:
    """Bound fractions of one call: W13 (on the activations), W2 (per slot) and the sum over the slots.

    `out_exact`: the sum has exactly the bits that the route's own slots give. `finite`: every
    judged element is finite. `samples` counts the elements that were judged.
    """

    w13: float
    w2: float
    out: float
    out_exact: bool
    finite: bool
    samples: int

    @property
    def ok(self) -> bool:
        """No bound is exceeded."""
        return all(value <= 1.0 for value in (self.w13, self.w2, self.out))


def judge(
    answer: Answer,
    intermediate: NDArray[Any],
    slots: NDArray[Any],
    out: NDArray[Any],
    weights: NDArray[Any],
    factor: float = 1.0,
) -> Judgement:
    """Judge what a route returned: intermediate (M, k, I), slots (M, k, H), out (M, H).

    `answer` is the reference's, with W2 computed on this very intermediate; `slots` are the route's
    own W2 results and weights (M, k) the router's. Real arrays, BF16 ones widened.
    """
    with np.errstate(all="ignore"):
        results = widen(intermediate), widen(slots), widen(out)
        expected = combine(results[1], widen(weights), answer.valid)
        return Judgement(
            w13=judge_w13(answer, results[0], factor),
            w2=judge_w2(answer, results[1], factor),
            out=judge_sum(answer, results[1], results[2], widen(weights), factor),
            out_exact=np.array_equal(answer.format.round(expected), results[2], equal_nan=True),
            finite=all(bool(np.isfinite(r).all()) for r in results),
            samples=sum(r.size for r in results),
        )


def gamma(terms: int, factor: float = 1.0) -> float:
    """Relative error of a sum of `terms` products, against the sum of absolute values."""
    relative = terms * UNIT * factor
    return relative / (1 - relative)


def judge_w13(answer: Answer, intermediate: Floats, factor: float = 1.0) -> float:
    """Bound fraction of the activations (M, k, I) between W13 and W2."""
    return worst(w13_ratios(answer, intermediate, factor))


def w13_ratios(answer: Answer, intermediate: Floats, factor: float = 1.0) -> Floats:
    """|error| / bound of each activation (M, k, I)."""
    kind, error_per_size = answer.format, gamma(answer.hidden, factor)
    gate, up = answer.gate, answer.up
    dot_gate, dot_up = error_per_size * answer.gate_size, error_per_size * answer.up_size
    of_gate, of_up = rounded(kind, gate, dot_gate), rounded(kind, up, dot_up)
    activated = silu(gate)
    computed = np.abs(slope(gate)) * of_gate + SILU_UNITS * UNIT * factor * np.abs(activated)
    of_silu = rounded(kind, activated, computed)
    exact = activated * up
    carried = np.abs(up) * of_silu + np.abs(activated) * of_up + of_silu * of_up
    near = straddles(kind, gate, dot_gate) | straddles(kind, up, dot_up) | straddles(kind, exact, carried)
    return ratios(answer.activations, exact, intermediate, final_bound(kind, exact, carried), near, answer.valid)


def judge_w2(answer: Answer, slots: Floats, factor: float = 1.0) -> float:
    """Bound fraction of the W2 results (M, k, H) of each slot."""
    error = gamma(answer.intermediate, factor) * answer.slot_size
    bound = final_bound(answer.format, answer.slots, error)
    near = straddles(answer.format, answer.slots, error)
    return worst(ratios(answer.products, answer.slots, slots, bound, near, answer.valid))


def judge_sum(answer: Answer, slots: Floats, out: Floats, weights: Floats, factor: float = 1.0) -> float:
    """Bound fraction of the output (M, H), given the route's own slots and the router's weights."""
    total = combine(slots, weights, answer.valid)
    sizes = combine(np.abs(slots), np.abs(weights), answer.valid)
    error = gamma(slots.shape[1], factor) * sizes
    bound, near = final_bound(answer.format, total, error), straddles(answer.format, total, error)
    return worst(ratios(answer.format.round(total), total, out, bound, near, answer.valid.any(axis=1)))


def out_ratios(answer: Answer, out: Floats, weights: Floats, factor: float = 1.0) -> Floats:
    """|error| / bound of each output (M, H) where nobody saw the slots: their bounds are carried through the sum."""
    error = gamma(answer.intermediate, factor) * answer.slot_size
    slots = final_bound(answer.format, answer.slots, error)
    live = np.where(answer.valid, np.abs(widen(weights)), 0.0)[:, :, None]
    carried = (live * slots).sum(axis=1) + gamma(out_terms(answer), factor) * (live * np.abs(answer.slots)).sum(axis=1)
    bound, near = final_bound(answer.format, answer.total, carried), straddles(answer.format, answer.total, carried)
    return ratios(answer.out, answer.total, out, bound, near, answer.valid.any(axis=1))


def out_terms(answer: Answer) -> int:
    """Terms of the sum over the slots."""
    return int(answer.slots.shape[1])


def rounded(kind: Format, value: Floats, error: Floats) -> Floats:
    """Error of `value` after a rounding point, from its error before; FP32 has no rounding points."""
    return error + kind.half_ulp(np.abs(value) + error) if kind.rounds else error


def final_bound(kind: Format, value: Floats, error: Floats) -> Floats:
    """Bound of a judged result, from the error before its last rounding."""
    return np.maximum(error + kind.half_ulp(np.abs(value) + error) + SLACK, FLOOR)


def slope(gate: Floats) -> Floats:
    """Derivative of silu."""
    with np.errstate(over="ignore"):
        sigmoid = 1.0 / (1.0 + np.exp(-gate))
    return sigmoid * (1.0 + gate * (1.0 - sigmoid))


def straddles(kind: Format, value: Floats, error: Floats) -> Mask:
    """Where a value may as well be the largest finite number as infinity."""
    size = np.abs(value)
    return np.logical_and(size - error < kind.overflow, kind.overflow <= size + error)


def ratios(expected: Floats, exact: Floats, found: Floats, bound: Floats, near: Mask, valid: Mask) -> Floats:
    """|found - exact| / bound of each element; `expected` is `exact` with the rounding points applied.

    `near` marks elements whose overflow is open, `valid` (fewer axes) the slots that are not zero.
    """
    live = np.broadcast_to(valid.reshape(valid.shape + (1,) * (found.ndim - valid.ndim)), found.shape)
    both = np.isfinite(expected) & np.isfinite(found)
    same = both | (np.isnan(expected) & np.isnan(found)) | (expected == found)
    ratio = np.where(both, np.abs(found - exact) / bound, np.where(same | near, 0.0, np.inf))
    return np.where(live, ratio, np.where(found == 0, 0.0, np.inf))


def worst(found: Floats) -> float:
    """Bound fraction of many elements; 0 of none."""
    return float(found.max(initial=0.0))
