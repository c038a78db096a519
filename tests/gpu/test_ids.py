"""Ids as they come: all invalid, some invalid, several times in a token, the same for all tokens, INT64."""

from __future__ import annotations

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits

pytestmark = pytest.mark.gpu

EVERY_M = range(1, 9)


@pytest.fixture(scope="module")
def subject(layers):
    return layers.make()


@pytest.mark.parametrize("tokens", EVERY_M)
def test_all_ids_invalid_give_exact_zeros(subject, tokens: int) -> None:
    """Positive zeros, whatever the invalid numbers are, and where the router's weights are NaN or infinite."""
    made = subject.call(tokens)
    for number in (-1, subject.sizes.experts, 2**31 - 1, -(2**31)):
        for weight in (torch.nan, torch.inf):
            none = Inputs(made.x, torch.full_like(made.ids, number), torch.full_like(made.weights, weight))
            assert not subject.answer(none).view(torch.int16).any()


@pytest.mark.parametrize("tokens", EVERY_M)
def test_invalid_slots_are_as_if_they_were_not_there(subject, tokens: int) -> None:
    """Their weights are not read: NaN there changes no bit, and neither does which invalid number it is."""
    made = subject.mixed(tokens, seed=10 + tokens)
    invalid = (made.ids < 0) | (made.ids >= subject.sizes.experts)
    wanted = subject.answer(Inputs(made.x, made.ids.masked_fill(invalid, -1), made.weights.masked_fill(invalid, 0.0)))
    for number in (-1, subject.sizes.experts, 2**31 - 1, -(2**31)):
        odd = Inputs(made.x, made.ids.masked_fill(invalid, number), made.weights.masked_fill(invalid, torch.nan))
        assert same_bits(subject.answer(odd), wanted)


@pytest.mark.parametrize("tokens", EVERY_M)
def test_duplicates_in_a_token_stay_separate_slots(subject, tokens: int) -> None:
    """One expert in every slot, with a weight for each slot, against the reference."""
    made = subject.call(tokens, seed=20 + tokens)
    result = subject.judge(Inputs(made.x, made.ids[:, :1].expand_as(made.ids).contiguous(), made.weights))
    assert result.ok, result
    assert result.out_exact


@pytest.mark.parametrize("tokens", EVERY_M)
def test_all_tokens_with_the_same_experts(subject, tokens: int) -> None:
    """Each expert's weights serve every token, against the reference."""
    made = subject.call(tokens, seed=30 + tokens)
    result = subject.judge(Inputs(made.x, made.ids[:1].expand_as(made.ids).contiguous(), made.weights))
    assert result.ok, result
    assert result.out_exact


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_no_two_tokens_share_an_order_of_experts(subject, tokens: int) -> None:
    """The same experts in another order for each token: slots are found wherever they stand."""
    made = subject.call(tokens, seed=40)
    ids = torch.stack([made.ids[0].roll(token) for token in range(tokens)])
    result = subject.judge(Inputs(made.x, ids, made.weights))
    assert result.ok, result


@pytest.mark.parametrize("tokens", EVERY_M)
def test_numbers_of_a_router_are_converted(subject, routes_of, tokens: int) -> None:
    """INT64 ids, far outside too, and 16-bit weights take the native route and give the bits of INT32 and FP32."""
    made = subject.mixed(tokens, seed=50 + tokens)
    invalid = (made.ids < 0) | (made.ids >= subject.sizes.experts)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = made.weights.to(dtype)
        wanted = subject.answer(Inputs(made.x, made.ids, narrow.float()))
        with routes_of(subject.layer) as taken:
            found = subject.layer(made.x, made.ids.long().masked_fill(invalid, 2**40 + 1), narrow)
        assert taken == ["qpn_m1" if tokens == 1 else "grouped_decode"]
        assert same_bits(found, wanted)


def test_no_tokens(subject, routes_of) -> None:
    """(0, H) comes back, and nothing runs."""
    made = subject.call(1)
    with routes_of(subject.layer) as taken:
        assert subject.layer(made.x[:0], made.ids[:0], made.weights[:0]).shape == (0, subject.sizes.hidden)
    assert taken == []
