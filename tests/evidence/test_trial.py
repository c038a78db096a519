from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs, Result, Trial, same_bits, sample
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata

LAYER = SyntheticLayer(experts=5, hidden=64, intermediate=64, group=32, seed=21)
BANKS = BankLayout("tile32x8", Metadata.FOUR_BYTE, 32, True, True)


class Good:
    """The legacy route; subclasses spoil it."""

    def __init__(self) -> None:
        self.backend, self.calls = LegacyBackend(), 0
        self.banks = self.backend.prepare(LAYER, BANKS, BankShape(5, 64, 64), "cpu")

    def __call__(self, given: Call) -> None:
        self.calls += 1
        assert torch.isnan(given.out).all()
        self.backend.run(self.banks, given)
        self.spoil(given.ids, given.out, given.intermediate)

    def spoil(self, ids: torch.Tensor, out: torch.Tensor, inner: torch.Tensor | None) -> None: ...


def call(tokens: int, dtype: str = "float16", seed: int = 3) -> Inputs:
    return Inputs.random(tokens, 2, hidden=64, experts=5, dtype=dtype, seed=seed)


def judge(route: Good, given: Inputs, rows: int = 16) -> Result:
    return Trial("legacy", "torch", route, LAYER.reference, 64, rows=rows).judge(given)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (8, 8), (40, 16)])
def test_a_right_route(tokens: int, rows: int, dtype: str) -> None:
    """A right route is inside every bound; a long call is judged on 16 rows."""
    found = judge(Good(), call(tokens, dtype))
    assert found.ok
    assert found.out_exact
    assert (found.route, found.backend, found.tokens, found.rows) == ("legacy", "torch", tokens, rows)
    assert found.seconds > 0


def test_number_of_runs() -> None:
    """Two runs of the call and one probe for each slot."""
    route = Good()
    judge(route, call(4))
    assert route.calls == 4


def test_no_tokens() -> None:
    """An empty call has nothing to judge and is right."""
    assert judge(Good(), call(0)).ok


def test_invalid_and_duplicate_ids() -> None:
    """Calls with ids that are invalid or equal are judged like any other."""
    given = call(4)
    given.ids[0] = torch.tensor([-1, 2])
    given.ids[1] = torch.tensor([3, 3])
    given.ids[2] = torch.tensor([5, 99])
    assert judge(Good(), given).ok


def test_a_route_that_changes_between_calls() -> None:
    """Bits that differ from one call to the next are not repeatable."""

    class Wanders(Good):
        def spoil(self, ids: Any, out: Any, inner: Any) -> None:
            if self.calls == 1:
                out[0, 0] += 0.001

    found = judge(Wanders(), call(2))
    assert not found.repeatable
    assert not found.ok


def test_a_route_that_leaves_a_row_unwritten() -> None:
    """A row that keeps its poison is not finite, also where it is not among the judged rows."""

    class Forgets(Good):
        def spoil(self, ids: Any, out: Any, inner: Any) -> None:
            if self.calls <= 2:
                out[1] = float("nan")

    found = judge(Forgets(), call(40), rows=2)
    assert not found.finite
    assert found.w2 <= 1
    assert not found.ok


def test_a_route_that_writes_rows_without_valid_ids() -> None:
    """A row whose ids are all invalid must be exactly zero in every probe."""

    class Leaks(Good):
        def spoil(self, ids: Any, out: Any, inner: Any) -> None:
            out[(ids < 0).all(dim=1)] = 2.0**-24

    found = judge(Leaks(), call(40), rows=2)
    assert found.record()["out"] is None
    assert not found.ok


def test_a_wrong_intermediate() -> None:
    """Activations that are not those of the reference are seen in W13, whichever run exports them."""

    class Doubles(Good):
        def spoil(self, ids: Any, out: Any, inner: Any) -> None:
            if inner is not None and self.calls == 2:
                inner.mul_(2)

    assert judge(Doubles(), call(3)).w13 > 1


def test_a_wrong_slot() -> None:
    """An error in one slot's W2 result is seen there."""

    class Skews(Good):
        def spoil(self, ids: Any, out: Any, inner: Any) -> None:
            out.mul_(1.01)

    found = judge(Skews(), call(3))
    assert found.w2 > 1
    assert found.w13 <= 1


def test_record_is_plain_json() -> None:
    """A record survives JSON, without the NaN and Infinity that JSON does not have."""
    found = Result("a", "b", 1, 1, 0.5, float("inf"), 0.25, float("nan"), False, False, True)
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["w13"] is None
    assert record["out"] is None
    assert record["w2"] == 0.25
    assert record["ok"] is False


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [(0, 4, []), (1, 4, [0]), (4, 4, [0, 1, 2, 3]), (128, 4, [0, 42, 85, 127]), (8192, 3, [0, 4096, 8191])],
)
def test_sample(tokens: int, count: int, expected: list[int]) -> None:
    """Evenly spread, the first and the last row among them."""
    assert sample(tokens, count).tolist() == expected


def test_same_bits() -> None:
    """NaN equals itself, and minus zero is not zero."""
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)


def test_random_calls() -> None:
    """A seed gives the same call again; a row's ids differ, and its weights sum to 1."""
    one, two = call(6), call(6)
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.ids, two.ids)
    assert not torch.equal(one.x, call(6, seed=4).x)
    assert (one.ids[:, 0] != one.ids[:, 1]).all()
    assert torch.allclose(one.weights.sum(dim=1), torch.ones(6))
    many = Inputs.random(2, 7, hidden=8, experts=3)
    assert many.ids.shape == (2, 7)
    assert set(many.ids.flatten().tolist()) <= {0, 1, 2}
