from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sm70_moe.evidence.synthetic import Numbers, SyntheticLayer
from sm70_moe.reference.arithmetic import Answer, AwqMatrix, silu
from sm70_moe.reference.bounds import (
    FLOOR,
    Judgement,
    final_bound,
    gamma,
    judge,
    judge_sum,
    judge_w2,
    judge_w13,
    out_ratios,
    slope,
    w13_ratios,
)
from sm70_moe.reference.rounding import FORMATS, FP16

Array = NDArray[Any]
ALL = slice(None)

LAYER = SyntheticLayer(experts=4, hidden=512, intermediate=128, group=32, seed=11)
TOKENS, TOP_K = 6, 3


def call() -> tuple[Array, Array, Array]:
    """x FP16, ids, router weights FP32."""
    source = np.random.default_rng(2)
    x = source.normal(size=(TOKENS, LAYER.hidden)).astype(np.float16)
    ids = np.argsort(source.random((TOKENS, LAYER.experts)), axis=1)[:, :TOP_K]
    weights = source.random((TOKENS, TOP_K)).astype(np.float32)
    return x, ids, weights / weights.sum(axis=1, keepdims=True)


def forwards(rows: Array, weight: Array) -> Array:
    """FP32, one product after the other."""
    total = np.zeros(weight.shape[1], np.float32)
    for k in range(len(weight)):
        total += np.float32(rows[k]) * weight[k].astype(np.float32)
    return total


def backwards(rows: Array, weight: Array) -> Array:
    return forwards(rows[::-1], weight[::-1])


def split(rows: Array, weight: Array) -> Array:
    """FP32 in eight interleaved partial sums, as a warp does it."""
    parts = [forwards(rows[i::8], weight[i::8]) for i in range(8)]
    return np.add.reduce(parts, dtype=np.float32)


def blas(rows: Array, weight: Array) -> Array:
    return rows.astype(np.float32) @ weight.astype(np.float32)


def half_sums(rows: Array, weight: Array) -> Array:
    """The fault of accumulating in FP16."""
    total = np.zeros(weight.shape[1], np.float16)
    for k in range(len(weight)):
        total = (total + rows[k] * weight[k].astype(np.float16)).astype(np.float16)
    return total.astype(np.float32)


def half(values: Array) -> Array:
    return values.astype(np.float16)


class Route:
    """A route in plain numpy, with places where a fault can be planted."""

    def __init__(self) -> None:
        self.dot: Callable[[Array, Array], Array] = blas
        self.dot_w2: Callable[[Array, Array], Array] | None = None
        self.matrices: Callable[[dict[str, AwqMatrix]], dict[str, AwqMatrix]] = lambda m: m
        self.round_slot: Callable[[Array], Array] = half
        self.fuse = True

    def decoded(self, expert: int) -> dict[str, Array]:
        words = LAYER.words(expert)
        changed = self.matrices({"gate": words.gate, "up": words.up, "down": words.down})
        return {name: matrix.weights(ALL, ALL).astype(np.float16) for name, matrix in changed.items()}

    def run(self) -> tuple[Array, Array, Array]:
        """intermediate (M, k, I), probed slots (M, k, H), out (M, H)."""
        x, ids, weights = call()
        inner = np.zeros((TOKENS, TOP_K, LAYER.intermediate), np.float16)
        slots = np.zeros((TOKENS, TOP_K, LAYER.hidden), np.float32)
        for token, slot in np.ndindex(TOKENS, TOP_K):
            weight = self.decoded(int(ids[token, slot]))
            gate, up = (half(self.dot(x[token], weight[name])).astype(np.float32) for name in ("gate", "up"))
            inner[token, slot] = half(half(silu(gate)).astype(np.float32) * up)
            slots[token, slot] = (self.dot_w2 or self.dot)(inner[token, slot], weight["down"])
        summands = self.round_slot(slots).astype(np.float64)
        out = np.zeros((TOKENS, LAYER.hidden), np.float32)
        for slot in range(TOP_K):
            out = (weights[:, slot, None].astype(np.float64) * summands[:, slot] + out).astype(np.float32)
        return inner, half(slots), half(out)

    def judge(self) -> Judgement:
        x, ids, weights = call()
        inner, slots, out = self.run()
        return judge(LAYER.reference.answer(x, ids, weights, "float16", inner), inner, slots, out, weights)


# ---- right routes ------------------------------------------------------------------------------


@pytest.mark.parametrize("dot", [forwards, backwards, split, blas])
def test_any_order_of_summation_is_right(dot: Callable[[Array, Array], Array]) -> None:
    """FP32 in four orders of summation stays inside every bound."""
    route = Route()
    route.dot = dot
    found = route.judge()
    assert found.ok
    assert found.finite
    assert found.out_exact
    assert found.samples == TOKENS * (TOP_K * (LAYER.intermediate + LAYER.hidden) + LAYER.hidden)


def test_bounds_are_not_loose() -> None:
    """A right route comes close to the bound of W2 and of the sum, where rounding is nearly all of it."""
    found = Route().judge()
    assert found.w2 > 0.9
    assert found.out > 0.9
    assert found.w13 > 0.1


# ---- planted faults ----------------------------------------------------------------------------


def changed(name: str, edit: Callable[[Numbers], Numbers]) -> Callable[[dict[str, AwqMatrix]], dict[str, AwqMatrix]]:
    """Replace one matrix by an edited one; every expert's own numbers are found again by its words."""

    def apply(matrices: dict[str, AwqMatrix]) -> dict[str, AwqMatrix]:
        for expert in range(LAYER.experts):
            numbers = LAYER.numbers(expert)[name]
            if np.array_equal(numbers.words.qweight, matrices[name].qweight):
                return {**matrices, name: edit(numbers).words}
        raise AssertionError(name)

    return apply


def one_zero_off(numbers: Numbers) -> Numbers:
    """One zero point of one group and column differs by one."""
    zeros = numbers.zeros.copy()
    zeros[1, 5] ^= 1
    return replace(numbers, zeros=zeros)


def zeros_plus_one(numbers: Numbers) -> Numbers:
    return replace(numbers, zeros=((numbers.zeros + 1) % 16).astype(np.uint8))


def one_group_shifted(numbers: Numbers) -> Numbers:
    """The third group takes scales and zeros of the second, as a wrong row offset would."""
    scales, zeros = numbers.scales.copy(), numbers.zeros.copy()
    scales[2], zeros[2] = scales[1], zeros[1]
    return replace(numbers, scales=scales, zeros=zeros)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
@pytest.mark.parametrize("edit", [one_zero_off, zeros_plus_one, one_group_shifted])
def test_wrong_metadata_is_seen(name: str, edit: Callable[[Numbers], Numbers]) -> None:
    """One wrong zero point, wrong zeros everywhere or one shifted group exceed the bound of that matrix alone."""
    route = Route()
    route.matrices = changed(name, edit)
    found = route.judge()
    assert (found.w13 > 1) == (name != "down")
    assert (found.w2 > 1) == (name == "down")


def test_swapped_gate_and_up_are_seen() -> None:
    """silu on the wrong half exceeds the bound of W13."""
    route = Route()
    route.matrices = lambda m: {"gate": m["up"], "up": m["gate"], "down": m["down"]}
    assert route.judge().w13 > 1


def test_half_accumulation_is_seen() -> None:
    """FP16 sums exceed the bound of W13, and of W2 if they are made there."""
    w13, w2 = Route(), Route()
    w13.dot, w13.dot_w2 = half_sums, blas
    w2.dot_w2 = half_sums
    assert w13.judge().w13 > 1
    assert w13.judge().w2 <= 1
    assert w2.judge().w2 > 1
    assert w2.judge().w13 <= 1


def test_missing_rounding_of_slots_is_seen() -> None:
    """Slots that go into the sum unrounded look right one by one, but not in the sum."""
    route = Route()
    route.round_slot = lambda slots: slots
    found = route.judge()
    assert found.w2 <= 1
    assert found.out > 1
    assert not found.out_exact


def test_bias_rounded_elsewhere_is_seen() -> None:
    """half((q - zero) * scale) instead of the fused form differs from the exact weights by more than W2 allows."""
    route = Route()

    def decoded(expert: int) -> dict[str, Array]:
        found = {}
        for name, n in LAYER.numbers(expert).items():
            codes, zeros = n.codes.astype(np.float32), np.repeat(n.zeros.astype(np.float32), 32, axis=0)
            found[name] = half((codes - zeros) * np.repeat(n.scales.astype(np.float32), 32, axis=0))
        return found

    route.decoded = decoded  # type: ignore[method-assign]  # the fault
    assert route.judge().w2 > 1


# ---- NaN, infinity, zero -----------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_on_one_side_only_is_infinitely_wrong(place: int, bad: float) -> None:
    """One element that is not finite, where the reference is, counts as an infinite fraction of that stage."""
    x, ids, weights = call()
    results = list(Route().run())
    answer = LAYER.reference.answer(x, ids, weights, "float16", results[0])
    results[place] = results[place].copy()
    results[place].flat[7] = bad
    found = judge(answer, *results, weights)
    assert (found.w13, found.w2, found.out)[place] == np.inf
    assert not found.finite
    assert not found.ok


def test_a_row_that_is_nan_on_both_sides_is_right() -> None:
    """A NaN row that the reference has too spoils nothing."""
    x, ids, weights = call()
    results = [r.copy() for r in Route().run()]
    x[3, 0] = np.nan
    for result in results:
        result[3] = np.nan
    found = judge(LAYER.reference.answer(x, ids, weights, "float16", results[0]), *results, weights)
    assert found.ok
    assert not found.finite


def test_overflow_beside_the_threshold_is_open() -> None:
    """Where gate values may round to 65504 or to infinity, both are right; well beyond, only infinity is."""
    x, ids, weights = call()
    answer = LAYER.reference.answer(x, ids, weights, "float16")
    usual = {"gate_size": np.full_like(answer.gate, 65520.0), "up": np.ones_like(answer.up)}
    usual |= {"up_size": np.ones_like(answer.up), "activations": np.full_like(answer.gate, np.inf)}
    beside, beyond = (replace(answer, gate=np.full_like(answer.gate, g), **usual) for g in (65520.5, 66000.0))
    largest = np.full_like(answer.gate, 65504.0)
    assert judge_w13(beside, largest) <= 1
    assert judge_w13(beside, usual["activations"]) <= 1
    assert judge_w13(beyond, largest) == np.inf
    assert judge_w13(beyond, usual["activations"]) <= 1


@pytest.mark.parametrize(
    ("gate", "up", "error", "open_at"),
    [
        (1.0, 65520.5, 1.0, 47888.0),  # only the up value may round to infinity
        (256.0, 255.9395, 0.0, 65504.0),  # only their product may: 65520.5, each off by half an ulp
        (1.0, 65000.0, 1.0, None),  # none may
    ],
)
def test_overflow_is_open_where_any_of_the_three_may(
    gate: float, up: float, error: float, open_at: float | None
) -> None:
    """Gate, up and product are looked at one by one; infinity is right wherever one of them may be."""
    x, ids, weights = call()
    answer = LAYER.reference.answer(x, ids, weights, "float16")
    size = np.full_like(answer.up, error / gamma(answer.hidden))
    near = replace(
        answer,
        gate=np.full_like(answer.gate, gate),
        gate_size=np.zeros_like(size),
        up=np.full_like(answer.up, up),
        up_size=size,
        activations=np.full_like(answer.gate, np.inf),
    )
    found = np.full_like(answer.gate, 65504.0 if open_at is None else open_at)
    assert judge_w13(near, found) == (np.inf if open_at is None else 0.0)


def test_hardware_that_truncates_gets_twice_the_room_in_every_stage() -> None:
    """The factor widens all three bounds, of FP32 results nearly by itself."""
    x, ids, weights = call()
    answer = LAYER.reference.answer(x, ids, weights, "float32")
    off = [np.asarray(part) * (1 + 1e-6) for part in (answer.activations, answer.slots, answer.out)]
    once, twice = (judge(answer, *off, weights, factor) for factor in (1.0, 2.0))
    for stage in ("w13", "w2", "out"):
        assert 0 < getattr(twice, stage) < 0.95 * getattr(once, stage)
        assert getattr(twice, stage) > 0.45 * getattr(once, stage)


@pytest.mark.parametrize("valid", [(True, True), (True, False)])
def test_a_sum_whose_slots_nobody_saw_has_their_bounds_carried_through(valid: tuple[bool, bool]) -> None:
    """Two slots 3 and -1 of one product each, weights 1/2 and -1/4, worked by hand; an invalid one adds nothing."""
    usual = LAYER.reference.answer(*call()[:2], call()[2], "float16")
    column = np.zeros((1, 2, 1))
    total = 1.5 + (0.25 if valid[1] else 0.0)
    answer = replace(
        usual,
        valid=np.array([valid]),
        gate=column,
        slots=np.array([[[3.0], [-1.0 if valid[1] else 0.0]]]),
        slot_size=np.array([[[4.0], [2.0 if valid[1] else 0.0]]]),
        total=np.array([[total]]),
        out=np.array([[total]]),
    )
    one, two = gamma(1), gamma(2)
    first, second = 4 * one + 2.0**-10 + 2.0**-25, 2 * one + 2.0**-11 + 2.0**-25
    carried = first / 2 + two * 1.5 + (second / 4 + two / 4 if valid[1] else 0.0)
    bound = carried + 2.0**-11 + 2.0**-25
    weights = np.array([[0.5, -0.25]])
    for error in (2.0**-10, -(2.0**-9)):
        found = out_ratios(answer, np.array([[total + error]]), weights)
        assert found.shape == (1, 1)
        assert found[0, 0] == pytest.approx(abs(error) / bound, rel=1e-12)
    wider = out_ratios(answer, np.array([[total + 2.0**-10]]), weights, 2.0)[0, 0]
    assert wider < 2.0**-10 / bound


def test_a_sum_beside_the_threshold_is_open() -> None:
    """65504 and infinity are both right for a sum that may be either; a token without slots must be zero."""
    usual = LAYER.reference.answer(*call()[:2], call()[2], "float16")
    answer = replace(
        usual,
        valid=np.array([[True], [False]]),
        gate=np.zeros((2, 1, 1)),
        slots=np.array([[[65520.5]], [[0.0]]]),
        slot_size=np.zeros((2, 1, 1)),
        total=np.array([[65520.5], [0.0]]),
        out=np.array([[np.inf], [0.0]]),
    )
    weights = np.ones((2, 1))
    for seen, ratios in ((65504.0, [0.0, 0.0]), (np.inf, [0.0, 0.0])):
        assert out_ratios(answer, np.array([[seen], [0.0]]), weights)[:, 0].tolist() == ratios
    assert out_ratios(answer, np.array([[np.inf], [2.0**-24]]), weights)[1, 0] == np.inf


@pytest.mark.parametrize("place", [0, 1])
def test_an_invalid_slot_must_be_zero(place: int) -> None:
    """Anything but zero in a slot with an invalid id is infinitely wrong, however small."""
    x, ids, weights = call()
    ids = ids.copy()
    ids[2, 1] = -1
    inner, slots, _ = (r.copy() for r in Route().run())
    inner[2, 1] = slots[2, 1] = 0
    answer = LAYER.reference.answer(x, ids, weights, "float16", inner)
    assert judge(answer, inner, slots, answer.out, weights).w2 <= 1
    (inner, slots)[place][2, 1, 4] = 2.0**-24
    found = judge(answer, inner, slots, answer.out, weights)
    assert (found.w13, found.w2)[place] == np.inf


# ---- the formula -------------------------------------------------------------------------------


def test_gamma() -> None:
    """K u / (1 - K u) with u = 2**-24, and twice that u where hardware truncates."""
    assert gamma(160) == (160 * 2.0**-24) / (1 - 160 * 2.0**-24)
    assert gamma(160, 2.0) == (320 * 2.0**-24) / (1 - 320 * 2.0**-24)


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (0.0, 0.0, 2.0**-24),  # half an ulp of a subnormal, and the slack
        (1.0, 0.0, 2.0**-11 + 2.0**-25),
        (-1.0, 0.0, 2.0**-11 + 2.0**-25),
        (2 - 2.0**-12, 2.0**-12, 2.0**-10 + 2.0**-12 + 2.0**-25),  # the error reaches the next binade
    ],
)
def test_final_bound(value: float, error: float, expected: float) -> None:
    """Half ulp + 2**-25 + error, never below 2**-24."""
    found = final_bound(FP16, np.array([value]), np.array([error]))
    assert found[0] == expected
    assert found[0] >= FLOOR


def test_slope_is_the_derivative_of_silu() -> None:
    """Central differences agree."""
    gate, step = np.linspace(-12, 12, 97), 1e-5
    assert np.allclose(slope(gate), (silu(gate + step) - silu(gate - step)) / (2 * step), atol=1e-8)


def by_hand(**changes: Any) -> Answer:
    """Two tokens with two slots, hidden 3, intermediate 1, in FP32, which has no rounding points."""
    ones, wide = np.ones((2, 2, 1)), np.ones((2, 2, 3))
    usual: dict[str, Any] = {
        "format": FORMATS["float32"],
        "valid": np.array([[True, True], [True, True]]),
        "gate": -8 * ones,
        "up": 2 * ones,
        "gate_size": 16 * ones,
        "up_size": 4 * ones,
        "activations": 2 * silu(-8 * ones),
        "slots": wide,
        "slot_size": 5 * wide,
        "products": wide,
        "total": np.ones((2, 3)),
        "out": np.ones((2, 3)),
        "terms": (64, 32),
    }
    return Answer(**{**usual, **changes})


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_bound_of_w13_by_hand(factor: float) -> None:
    """Gate -8 and up 2, sums of 64 products: first order in what each is off by, and 8 u of a small silu."""
    answer = by_hand()
    gate, up = 16 * gamma(64, factor), 4 * gamma(64, factor)
    small, steep = abs(float(silu(np.array(-8.0)))), abs(float(slope(np.array(-8.0))))
    of_silu = steep * gate + 8 * 2.0**-24 * factor * small
    carried = 2 * of_silu + small * up + of_silu * up
    exact = 2 * small
    half = 0.5 * np.spacing(np.float32(exact + carried))
    found = w13_ratios(answer, answer.activations + 1e-3, factor)
    expected = 1e-3 / max(carried + float(half) + 2.0**-25, 2.0**-24)
    assert found == pytest.approx(np.full((2, 2, 1), expected), rel=1e-6)


def test_the_bound_of_w2_by_hand() -> None:
    """Sums of 32 products with |a||w| of 5: gamma_32 * 5, half an ulp of FP32 at 1, and the slack."""
    answer = by_hand()
    bound = 5 * gamma(32) + 2.0**-24 + 2.0**-25
    off = answer.slots + np.where(np.arange(3) == 1, 2.0**-12, 0.0)
    assert judge_w2(answer, off) == pytest.approx(2.0**-12 / bound, rel=1e-6)
    assert judge_w2(answer, off, 2.0) < judge_w2(answer, off)


def test_the_bound_of_the_sum_by_hand() -> None:
    """Two slots, not three columns: gamma_2 * sum |weight||slot|; a token without slots is zero whatever others do."""
    weights = np.array([[0.5, -0.25], [1.0, 1.0]])
    answer = by_hand(valid=np.array([[True, True], [False, False]]))
    slots = np.where(answer.valid[:, :, None], answer.slots, 0.0)
    out = np.array([[0.25] * 3, [0.0] * 3])
    bound = gamma(2) * 0.75 + 2.0**-26 + 2.0**-25
    off = out + np.array([[0, 0, 2.0**-20], [0, 0, 0]])
    assert judge_sum(answer, slots, off, weights) == pytest.approx(2.0**-20 / bound, rel=1e-6)
    assert judge_sum(answer, slots, out + np.array([[0.0], [2.0**-30]]), weights) == np.inf


def test_gates_of_any_size_have_an_activation_and_a_slope() -> None:
    """BF16 gates go far beyond what an exponential holds: the results are exact there, and nothing warns."""
    gate = np.array([-1e38, -1e5, -800.0, 0.0, 800.0, 1e5, 1e38])
    assert silu(gate).tolist() == [0.0, 0.0, 0.0, 0.0, 800.0, 1e5, 1e38]
    assert slope(gate).tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
