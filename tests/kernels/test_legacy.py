from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.decision import Reason, Status
from sm70_moe.errors import BackendError
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs, Trial
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.portable.cut import PIECE_BYTES
from sm70_moe.kernels.portable.legacy import CHUNK_BYTES, LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.reference.bounds import judge

LAYER = SyntheticLayer(experts=6, hidden=64, intermediate=96, group=32, seed=5)
DTYPES = ("float16", "bfloat16", "float32")
NAN = float("nan")


def call(tokens: int, top_k: int = 3, dtype: str = "float16", seed: int = 0, layer: SyntheticLayer = LAYER) -> Inputs:
    return Inputs.random(tokens, top_k, hidden=layer.hidden, experts=layer.experts, dtype=dtype, seed=seed)


def run(banks: Banks, given: Inputs, backend: LegacyBackend | None = None, export: bool = False) -> Any:
    """The output of one call on a poisoned buffer; with `export` also the intermediate."""
    out = torch.full_like(given.x, NAN)
    shape = (*given.ids.shape, banks.shape.intermediate)
    inner = given.x.new_full(shape, NAN) if export else None
    (backend or LegacyBackend()).run(banks, Call(given.x, given.ids, given.weights, out, inner))
    return (out, inner) if export else out


def tokens_at_once(count: int) -> LegacyBackend:
    """A backend whose chunks have this many FP16 tokens of LAYER with three slots."""
    return LegacyBackend(chunk_bytes=count * 3 * ((64 + 2 * 96) * 2 + 96))


# ---- against the reference ---------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(1, 5),
    hidden=st.sampled_from([32, 96, 128]),
    per_rank=st.sampled_from([32, 40, 64]),
    ranks=st.sampled_from([1, 2, 4]),
    top_k=st.integers(1, 7),
    tokens=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    batched=st.booleans(),
    metadata=st.sampled_from(list(Metadata)),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_geometry_keeps_its_bounds(
    experts: int,
    hidden: int,
    per_rank: int,
    ranks: int,
    top_k: int,
    tokens: int,
    dtype: str,
    interleaved: bool,
    batched: bool,
    metadata: Metadata,
    seed: int,
    data: st.DataObject,
) -> None:
    """Every rank, layout, dtype and number of tokens stays inside the bounds, k above E included."""
    group = 8 if per_rank == 40 else 32
    rank = data.draw(st.integers(0, ranks - 1))
    layer = SyntheticLayer(experts, hidden, per_rank * ranks, group, ranks, rank, seed)
    layout = BankLayout("tile32x8", metadata, group, interleaved, batched)
    backend = LegacyBackend()
    banks = backend.prepare(layer, layout, BankShape(experts, hidden, per_rank), "cpu")
    trial = Trial("legacy", "legacy", lambda call: backend.run(banks, call), layer.reference, per_rank)
    result = trial.judge(call(tokens, top_k, dtype, seed, layer))
    assert result.ok
    assert result.out_exact


def test_regrouped_rank_keeps_its_bounds(banks_of: Callable[..., Banks]) -> None:
    """Rank 1 of four whose cut lies inside a group: banks in groups of 32 act as the whole groups of 64 say."""
    layer = SyntheticLayer(experts=4, hidden=64, intermediate=384, group=64, ranks=4, rank=1, seed=2)
    banks = banks_of(layer, group=32)
    backend = LegacyBackend()
    trial = Trial("legacy", "legacy", lambda call: backend.run(banks, call), layer.reference, 96)
    assert trial.judge(call(9, 2, layer=layer)).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_give_the_same_bits(banks_of: Callable[..., Banks], dtype: str) -> None:
    """Interleaved or not, batched or per expert, 3 or 4 bytes: one result."""
    given = call(11, dtype=dtype)
    expected = run(banks_of(LAYER), given, export=True)
    for choice in ({"interleaved": True}, {"batched": False}, {"metadata": Metadata.THREE_BYTE}):
        found = run(banks_of(LAYER, **choice), given, export=True)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_large_activations(banks_of: Callable[..., Banks]) -> None:
    """Activations that drive the intermediate past 6e4 overflow where the reference does, and nowhere else."""
    given = call(8)
    given.x.mul_(230)
    out, inner = run(banks_of(LAYER), given, export=True)
    x, ids, weights = (t.numpy() for t in (given.x, given.ids, given.weights))
    answer = LAYER.reference.answer(x, ids, weights, "float16", inner.numpy())
    assert np.isinf(answer.activations).any()
    assert (np.abs(answer.activations) < 6e4).any()
    assert judge(answer, inner.numpy(), answer.products, out.numpy(), weights).w13 <= 1


# ---- inputs that every route treats alike (CONTRACT 5) -----------------------------------------


@pytest.mark.parametrize("bad", [-1, -(2**31), 6, 7, 2**31 - 1])
@pytest.mark.parametrize("weight", [0.5, NAN, float("inf")])
def test_invalid_id_contributes_zero(
    banks_of: Callable[..., Banks], counting: Callable[[Banks], Any], bad: int, weight: float
) -> None:
    """An id outside 0..E-1 adds exactly nothing, whatever its weight, and no weight is read for it."""
    banks = counting(banks_of(LAYER))
    given = call(2)
    ids, weights = given.ids.clone(), given.weights.clone()
    ids[:, 1], weights[:, 1] = bad, weight
    out, inner = run(banks, Inputs(given.x, ids, weights), export=True)
    keep = [0, 2]
    without = run(banks_of(LAYER), Inputs(given.x, ids[:, keep].contiguous(), weights[:, keep].contiguous()))
    assert torch.equal(out, without)
    assert not inner[:, 1].any()
    assert set(banks.w13.decoded) == set(banks.w2.decoded) == set(ids[:, keep].flatten().tolist())


def test_all_invalid_is_exactly_zero(banks_of: Callable[..., Banks], counting: Callable[[Banks], Any]) -> None:
    """Without a valid id the output is zero, though x and the weights are NaN, and nothing is decoded."""
    banks = counting(banks_of(LAYER))
    ids = torch.tensor([[-1, 6], [99, -7]], dtype=torch.int32)
    given = Inputs(torch.full((2, 64), NAN).half(), ids, torch.full((2, 2), NAN))
    out, inner = run(banks, given, export=True)
    assert out.view(torch.int16).eq(0).all()
    assert inner.view(torch.int16).eq(0).all()
    assert banks.w13.decoded == []


def test_duplicate_ids_keep_their_own_weight(banks_of: Callable[..., Banks]) -> None:
    """The same expert twice is two slots: weights 2 and -1 give once the expert, 2 and -2 nothing."""
    banks, x = banks_of(LAYER), call(1).x
    one = torch.tensor([[4]], dtype=torch.int32)
    once = run(banks, Inputs(x, one, torch.ones(1, 1)))
    for weights, expected in (([2.0, -1.0], once), ([2.0, -2.0], torch.zeros_like(once)), ([0.5, 0.5], once)):
        given = Inputs(x, one.expand(1, 2).contiguous(), torch.tensor([weights]))
        assert torch.equal(run(banks, given), expected)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.0])
def test_plain_router_weights(banks_of: Callable[..., Banks], weight: float) -> None:
    """Weights need not be positive or sum to 1."""
    banks, given = banks_of(LAYER), call(3, top_k=1)
    once = run(banks, Inputs(given.x, given.ids, torch.ones(3, 1)))
    assert torch.equal(run(banks, Inputs(given.x, given.ids, torch.full((3, 1), weight))), weight * once)


def test_large_router_weight_overflows_at_the_end_only(banks_of: Callable[..., Banks]) -> None:
    """1e4 and -1e4 on one expert cancel exactly: the sum is FP32, not FP16."""
    banks, x = banks_of(LAYER), call(1).x * 20
    ids = torch.full((1, 2), 3, dtype=torch.int32)
    assert not run(banks, Inputs(x, ids, torch.tensor([[1e4, -1e4]]))).any()
    assert torch.isinf(run(banks, Inputs(x, ids, torch.tensor([[1e4, 1e4]])))).any()


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_bad_row_stays_one_row(banks_of: Callable[..., Banks], bad: float) -> None:
    """NaN or infinity in one token changes no bit of another token, though they share experts."""
    banks, given = banks_of(LAYER), call(7)
    ids = given.ids[:1].expand(7, 3).contiguous()
    clean = run(banks, Inputs(given.x, ids, given.weights))
    x = given.x.clone()
    x[2, 5] = bad
    spoiled = run(banks, Inputs(x, ids, given.weights))
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(spoiled[others], clean[others])
    assert not torch.isfinite(spoiled[2]).any()


@pytest.mark.parametrize("top_k", [0, 1, 3])
def test_no_tokens(banks_of: Callable[..., Banks], top_k: int) -> None:
    """M = 0 returns without an error."""
    given = Inputs(torch.empty(0, 64).half(), torch.empty(0, top_k, dtype=torch.int32), torch.empty(0, top_k))
    out, inner = run(banks_of(LAYER), given, export=True)
    assert (out.shape, inner.shape) == ((0, 64), (0, top_k, 96))


def test_no_slots(banks_of: Callable[..., Banks]) -> None:
    """k = 0 gives zero."""
    given = Inputs(torch.ones(2, 64).half(), torch.empty(2, 0, dtype=torch.int32), torch.empty(2, 0))
    assert not run(banks_of(LAYER), given).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeat_gives_the_same_bits(banks_of: Callable[..., Banks], dtype: str) -> None:
    """A call repeated gives the same bits, with and without an export."""
    banks, given = banks_of(LAYER), call(40, dtype=dtype)
    first = run(banks, given)
    for _ in range(3):
        assert torch.equal(run(banks, given), first)
        assert torch.equal(run(banks, given, export=True)[0], first)


def test_strided_arguments(banks_of: Callable[..., Banks]) -> None:
    """Arguments and outputs may be views with any strides."""
    banks, given = banks_of(LAYER), call(5)
    expected = run(banks, given, export=True)
    x = given.x.repeat(1, 2)[:, :64]
    ids, weights = given.ids.T.contiguous().T, given.weights.T.contiguous().T
    out = torch.full((64, 5), NAN).half().T
    inner = torch.full((3, 5, 96), NAN).half().transpose(0, 1)
    LegacyBackend().run(banks, Call(x, ids, weights, out, inner))
    assert torch.equal(out, expected[0])
    assert torch.equal(inner, expected[1])


# ---- chunks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33, 47, 100])
def test_chunks_change_no_bit(banks_of: Callable[..., Banks], tokens: int) -> None:
    """Around the size of a chunk, and over several, the bits are those of one chunk."""
    banks, given = banks_of(LAYER), call(tokens)
    assert tokens_at_once(16).chunk(banks.shape, 3, 2) == 16
    whole, pieces = (run(banks, given, b, export=True) for b in (LegacyBackend(), tokens_at_once(16)))
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(2, 70), seed=st.integers(0, 1000), dtype=st.sampled_from(DTYPES))
def test_row_does_not_depend_on_its_company(tokens: int, seed: int, dtype: str) -> None:
    """A token alone, reversed in order or among others has the same bits."""
    layout = BankLayout("tile32x8", Metadata.FOUR_BYTE, 32, True, True)
    banks = LegacyBackend().prepare(LAYER, layout, BankShape(6, 64, 96), "cpu")
    given = call(tokens, dtype=dtype, seed=seed)
    together = run(banks, given)
    for row in (0, tokens // 2, tokens - 1):
        alone = Inputs(given.x[row : row + 1], given.ids[row : row + 1], given.weights[row : row + 1])
        assert torch.equal(run(banks, alone)[0], together[row])
    turned = Inputs(given.x.flip(0), given.ids.flip(0), given.weights.flip(0))
    assert torch.equal(run(banks, turned).flip(0), together)


def test_one_decode_per_expert_and_chunk(banks_of: Callable[..., Banks], counting: Callable[[Banks], Any]) -> None:
    """Two chunks decode each of their experts once, in order."""
    banks = counting(banks_of(LAYER))
    run(banks, call(40), tokens_at_once(20))
    assert banks.w13.decoded == banks.w2.decoded == [*range(6), *range(6)]


def test_scratch_is_bounded() -> None:
    """Working memory grows with the tokens up to the stated constant, and not beyond."""
    shape, backend = BankShape(experts=512, hidden=2560, intermediate=160), LegacyBackend()
    assert backend.workspace(shape, 10, 0) == 0
    assert backend.workspace(shape, 10, 1) < backend.workspace(shape, 10, 128)
    assert backend.workspace(shape, 10, 8192) == backend.workspace(shape, 10, 10**6)
    assert CHUNK_BYTES < backend.workspace(shape, 10, 8192) < CHUNK_BYTES + PIECE_BYTES + (64 << 20)


def test_a_token_larger_than_a_chunk_is_run_alone() -> None:
    """At least one token is run at once, and scratch counts it."""
    shape = BankShape(experts=1, hidden=64, intermediate=96)
    backend = LegacyBackend(chunk_bytes=1)
    assert backend.chunk(shape, 3, 2) == 1
    more = LegacyBackend().workspace(shape, 3, 1) - backend.workspace(shape, 3, 100)
    assert more == 0


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "status", "reason"),
    [("float16", Status.PASS, None), ("float64", Status.FAIL, Reason.ACTIVATION_DTYPE)],
)
def test_a_dtype_that_no_call_could_have(dtype: str, status: Status, reason: Reason | None) -> None:
    """It is refused early; one that nobody gave is the contract's matter."""
    ability = LegacyBackend().can("cpu")
    assert ability is not None
    finding = ability.dtype_finding(dtype)
    assert finding is not None
    assert (finding.status, finding.reason) == (status, reason)
    assert ability.dtype_finding(None) is None


def test_incomplete_banks_are_refused() -> None:
    """Banks in which an expert never arrived do not run; the expert is named."""
    banks = allocate(BankLayout("tile32x8", Metadata.FOUR_BYTE, 32, False, True), BankShape(6, 64, 96), "cpu")
    for expert in (0, 1, 2, 4, 5):
        banks.fill(expert, LAYER.read(expert, 32))
    with pytest.raises(BackendError, match="3"):
        run(banks, call(1))
