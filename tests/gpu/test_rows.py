"""A token's result is the same bits alone and in any company of up to eight, whatever its neighbours are."""

from __future__ import annotations

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits

pytestmark = pytest.mark.gpu

FIRST = {"hidden": 2560, "intermediate": 160, "top_k": 10, "group": 32}
ODD = {"hidden": 608, "intermediate": 96, "top_k": 3, "group": 32}
WIDE = {"hidden": 896, "intermediate": 128, "top_k": 6, "group": 128}
CASES = [
    *(("octet32", metadata, FIRST) for metadata in ("4-byte", "3-byte", "2.5-byte")),
    *(("tile32x8", metadata, FIRST) for metadata in ("4-byte", "3-byte")),
    ("octet32", "2.5-byte", ODD),
    ("octet32", "4-byte", WIDE),
    ("tile32x8", "2.5-byte", WIDE),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]['hidden']}")
def subject(request: pytest.FixtureRequest, layers):
    order, metadata, sizes = request.param
    return layers.make(order=order, metadata=metadata, **sizes)


def rows(call: Inputs, start: int, stop: int) -> Inputs:
    return Inputs(*(t[start:stop].clone() for t in (call.x, call.ids, call.weights)))


def alone(subject, call: Inputs) -> torch.Tensor:
    """Every row by itself: calls of the single-token route."""
    return torch.cat([subject.answer(rows(call, i, i + 1)) for i in range(call.tokens)])


@pytest.mark.parametrize("kind", ["call", "mixed"])
def test_every_part_of_a_call(subject, kind: str) -> None:
    """2 to 8 tokens from any row on: each row has the bits of its single call."""
    whole = getattr(subject, kind)(8, seed=80)
    wanted = alone(subject, whole)
    for tokens in range(2, 9):
        for start in range(9 - tokens):
            found = subject.answer(rows(whole, start, start + tokens))
            assert same_bits(found, wanted[start : start + tokens]), (tokens, start)


@pytest.mark.parametrize("tokens", range(2, 9))
def test_random_companions_with_shared_experts(subject, tokens: int) -> None:
    """One token at every place among others that ask for its experts too, in other orders and several times."""
    token = subject.call(1, seed=90)
    wanted, source = subject.answer(token), torch.Generator().manual_seed(tokens)
    for place in range(tokens):
        company = subject.call(tokens, seed=100 + place)
        chosen = torch.randint(0, subject.sizes.top_k, company.ids.shape, generator=source).to(subject.device)
        shared = (torch.rand(company.ids.shape, generator=source) < 0.7).to(subject.device)
        company.ids.copy_(torch.where(shared, token.ids[0][chosen.long()], company.ids))
        for mine, theirs in ((company.x, token.x), (company.ids, token.ids), (company.weights, token.weights)):
            mine[place] = theirs[0]
        assert same_bits(subject.answer(company)[place], wanted[0])


@pytest.mark.parametrize("kind", ["call", "mixed"])
@pytest.mark.parametrize("tokens", range(2, 9))
def test_bad_rows_stay_bad_rows(subject, tokens: int, kind: str) -> None:
    """Infinity and NaN in x and in the router's weights of one row, or of all but one, leave the others' bits."""
    good = getattr(subject, kind)(tokens, seed=81)
    wanted = alone(subject, good)
    for row in range(tokens):
        others = [other for other in range(tokens) if other != row]
        for bad, kept in (([row], others), (others, [row])):
            found = subject.answer(spoiled(good, bad))
            assert same_bits(found[kept], wanted[kept]), bad


def spoiled(call: Inputs, bad: list[int]) -> Inputs:
    """The call with numbers that are not finite in these rows."""
    x, weights = call.x.clone(), call.weights.clone()
    for row in bad:
        value = (torch.inf, torch.nan, -torch.inf)[row % 3]
        x[row, row::7] = value
        weights[row, row % 2 :: 2] = value
    return Inputs(x, call.ids, weights)


def test_a_row_of_infinities_is_the_same_bad_row_alone(subject) -> None:
    """What a bad row gives does not depend on its company either: the same places are finite, with the same bits."""
    call = subject.call(8, seed=82)
    call.x[3] = torch.inf
    call.x[6, 1] = torch.nan
    one, other = subject.answer(call), alone(subject, call)
    for row in range(8):
        finite = one[row].isfinite()
        assert torch.equal(finite, other[row].isfinite())
        assert same_bits(one[row][finite], other[row][finite])
