"""Expert sets: as many different ones as the rule says, never the same ones soon again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.benchmark.protocol import ROUTINGS
from sm70_moe.benchmark.routing import Routing, routings
from sm70_moe.errors import SettingsError

FIRST = {"layers": 48, "banks": 12, "top_k": 10, "experts": 512}


@pytest.mark.parametrize(("tokens", "distinct"), [(1, 10.0), (2, 19.8), (4, 38.8), (8, 74.7)])
def test_uniform_has_as_many_experts_as_expected(tokens: int, distinct: float) -> None:
    """512 * (1 - (1 - 10/512)^M), within what 48 draws scatter."""
    found = Routing.make("uniform", tokens=tokens, **FIRST)
    assert found.ids.shape == (48, tokens, 10)
    assert found.mean_distinct() == pytest.approx(distinct, rel=0.02)


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_overlapping_is_one_set_for_all(tokens: int) -> None:
    """All tokens of a layer have the same row."""
    found = Routing.make("overlapping", tokens=tokens, **FIRST)
    assert found.mean_distinct() == found.most_distinct == 10
    assert (found.ids == found.ids[:, :1]).all()


def test_the_mean_of_the_layers_that_are_timed() -> None:
    """Torch runs the first few layers only: its D is theirs."""
    found = Routing.make("uniform", tokens=8, **FIRST)
    assert found.mean_distinct(2) == (len(found.distinct(0)) + len(found.distinct(1))) / 2


def test_half_shared() -> None:
    """Five experts stand in every row; the other five are a token's own."""
    found = Routing.make("half-shared", tokens=4, **FIRST)
    assert (found.ids[:, :, :5] == found.ids[:, :1, :5]).all()
    assert 22 < found.mean_distinct() <= 25


@given(st.sampled_from(ROUTINGS), st.integers(1, 8), st.integers(2, 5), st.integers(1, 4), st.integers(0, 60))
def test_ids_are_valid_and_different_within_a_token(name: str, tokens: int, banks: int, top_k: int, more: int) -> None:
    """Whatever the sizes; and the same arguments give the same ids."""
    experts = top_k + more
    found = Routing.make(name, 7, banks, tokens, top_k, experts, seed=5)
    assert ((found.ids >= 0) & (found.ids < experts)).all()
    assert all(len(set(row)) == top_k for row in found.ids.reshape(-1, top_k).tolist())
    assert (found.ids == Routing.make(name, 7, banks, tokens, top_k, experts, seed=5).ids).all()
    assert found.ids.dtype == np.int32


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("banks", [2, 12])
def test_neighbours_on_a_bank_share_no_expert(name: str, banks: int) -> None:
    """A layer and the next one on the same bank have nothing in common, and all layers of one token on two
    banks are different as long as the experts last."""
    found = Routing.make(name, 48, banks, 8, 10, 512)
    for bank in range(banks):
        sets = [set(found.distinct(n).tolist()) for n in range(bank, 48, banks)]
        assert all(not one & other for one, other in pairwise(sets))
    alone = Routing.make(name, 48, banks, 1, 10, 512)
    for bank in range(banks):
        sets = [alone.distinct(n).tolist() for n in range(bank, 48, banks)]
        assert len({expert for one in sets for expert in one}) == 10 * len(sets)


def test_seeds_differ() -> None:
    """Another seed, another routing."""
    one, other = (Routing.make("uniform", tokens=2, seed=seed, **FIRST) for seed in (0, 1))
    assert (one.ids != other.ids).any()


def test_one_token_shares_with_nobody() -> None:
    """Routings that are all the same are measured once."""
    assert routings(1, ("uniform", "overlapping")) == ("uniform",)
    assert routings(2, ("uniform", "overlapping")) == ("uniform", "overlapping")


def test_unknown_routing() -> None:
    with pytest.raises(SettingsError, match="'zipf'"):
        Routing.make("zipf", tokens=1, **FIRST)
