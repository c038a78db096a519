"""On a GPU: the native decode routes against the FP64 reference, and a token's bits in company."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Call, Result, Trial, same_bits
from sm70_moe.kernels.build import INSTALLED
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.weights.banks import Banks

pytestmark = pytest.mark.gpu

LAYER = SyntheticLayer(experts=16, hidden=256, intermediate=128, group=32, ranks=2)
SHAPE, TOP_K = BankShape(16, 256, 64), 4
LAYOUTS = [("octet32", metadata) for metadata in Metadata] + [
    ("tile32x8", Metadata.FOUR_BYTE),
    ("tile32x8", Metadata.THREE_BYTE),
]
FACTOR = 2.0
"""Tensor cores do not round to nearest."""


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda found: f"{found[0]}-{found[1]}")
def banks(request: pytest.FixtureRequest) -> Banks:
    if Cubins.open(INSTALLED) is None:
        pytest.skip("this installation has no native build")
    order, metadata = request.param
    layout = BankLayout(order, metadata, group=32, interleaved=True, batched=True)
    return NativeBackend("qpn").prepare(LAYER, layout, SHAPE, "cuda:0")


def call(tokens: int, seed: int, few: bool = False) -> Call:
    """Random inputs; `few`: invalid ids, duplicates in a token, experts that tokens share."""
    made = Call.random(tokens, TOP_K, hidden=256, experts=16, seed=seed, device="cuda:0")
    if not few:
        return made
    ids = torch.randint(-1, 4, made.ids.shape, generator=torch.Generator().manual_seed(seed)).int()
    ids[ids == 3] = 16
    return Call(made.x, ids.to("cuda:0"), made.weights)


def judge(banks: Banks, made: Call) -> Result:
    name = "qpn" if made.tokens == 1 else "grouped"
    run = partial(NativeBackend(name).run, banks)
    return Trial(name, name, run, LAYER.reference, SHAPE.intermediate, factor=FACTOR).judge(made)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_inside_the_bounds(banks: Banks, tokens: int, few: bool) -> None:
    """W13, each slot of W2 and the sum keep their bounds; calls repeat; the sum has the bits of its slots."""
    result = judge(banks, call(tokens, tokens, few))
    assert result.ok
    assert result.out_exact


def answer(banks: Banks, made: Call) -> torch.Tensor:
    out = torch.full_like(made.x, torch.nan)
    NativeBackend("qpn" if made.tokens == 1 else "grouped").run(banks, made.x, made.ids, made.weights, out)
    return out


@pytest.mark.parametrize("few", [False, True])
def test_a_token_has_the_same_bits_alone_and_in_company(banks: Banks, few: bool) -> None:
    """Rows of calls of 2 to 8 tokens are those of single calls."""
    whole = call(8, 80, few)
    rows = [Call(whole.x[i : i + 1], whole.ids[i : i + 1], whole.weights[i : i + 1]) for i in range(8)]
    alone = torch.cat([answer(banks, row) for row in rows])
    for tokens in range(2, 9):
        part = Call(whole.x[:tokens], whole.ids[:tokens], whole.weights[:tokens])
        assert same_bits(answer(banks, part), alone[:tokens])


def test_a_bad_row_stays_one_bad_row(banks: Banks) -> None:
    """Infinity and NaN in two rows leave the bits of the others."""
    good = call(8, 81, few=True)
    x = good.x.clone()
    x[2, 5], x[5, 7] = torch.inf, torch.nan
    bad, others = Call(x, good.ids, good.weights), [0, 1, 3, 4, 6, 7]
    assert same_bits(answer(banks, bad)[others], answer(banks, good)[others])


def test_no_valid_id_gives_exact_zeros(banks: Banks) -> None:
    """Also where the router's weights are NaN."""
    for tokens in (1, 3, 8):
        made = call(tokens, tokens)
        none = Call(made.x, torch.full_like(made.ids, -1), made.weights * torch.nan)
        assert not answer(banks, none).view(torch.int16).any()
