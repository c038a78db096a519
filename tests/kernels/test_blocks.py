"""Blocks of slots that are found without reading an id on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.banks.banks import Banks
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.portable import cut, experts
from sm70_moe.kernels.portable.blocks import blocks_of
from sm70_moe.kernels.portable.cut import most_blocks
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.integers(-2, 7), min_size=1, max_size=60),
)
def test_every_valid_slot_is_in_one_block_of_its_expert(rows: int, top_k: int, flat: list[int]) -> None:
    """Each valid slot is live once, in a block of its own expert; invalid ones never."""
    flat = flat[: len(flat) // top_k * top_k] or flat[:1] * top_k
    ids = torch.tensor(flat, dtype=torch.int32).view(-1, top_k)
    blocks = blocks_of(ids, 6, rows)
    assert len(blocks) == most_blocks(ids.numel(), 6, rows)
    found: list[int] = []
    for expert, slots, live in zip(blocks.experts, blocks.slots, blocks.live, strict=True):
        chosen = slots[live].tolist()
        assert all(ids.flatten()[slot] == expert for slot in chosen)
        assert chosen == sorted(chosen)
        found += chosen
    assert sorted(found) == [slot for slot, value in enumerate(flat[: ids.numel()]) if 0 <= value < 6]


def run(banks: Banks, ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(len(ids), 64, generator=source).to(dtype)
    weights = torch.rand(ids.shape, generator=source)
    out, inner = torch.full_like(x, torch.nan), x.new_full((*ids.shape, 32), torch.nan)
    LegacyBackend().run(banks, Call(x, ids, weights, out, inner))
    return out, inner


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
def test_both_ways_give_the_same_bits(
    banks_of: Callable[..., Banks], monkeypatch: pytest.MonkeyPatch, tokens: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Blocks and visits compute the same numbers, invalid and duplicate ids included."""
    banks = banks_of(SyntheticLayer(6, 64, 32, 32), interleaved=interleaved)
    ids = torch.randint(-1, 7, (tokens, 4), generator=torch.Generator().manual_seed(tokens)).int()
    ids[0] = ids[0, 0]
    by_host = run(banks, ids, dtype)
    monkeypatch.setattr(experts, "on_device", lambda *_: True)
    by_device = run(banks, ids, dtype)
    assert all(torch.equal(a, b) for a, b in zip(by_host, by_device, strict=True))


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_pieces_and_rows_change_no_bit_of_an_fp32_sum(
    banks_of: Callable[..., Banks], monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """One block at a time, or all at once: the same blocks, each run once; larger blocks for more slots."""
    banks = banks_of(SyntheticLayer(6, 64, 32, 32))
    ids = torch.randint(-1, 7, (tokens, 4), generator=torch.Generator().manual_seed(tokens)).int()
    monkeypatch.setattr(experts, "on_device", lambda *_: True)
    whole = run(banks, ids, torch.float16)
    monkeypatch.setattr(cut, "PIECE_BYTES", 1)
    assert cut.Cut.of(banks.shape, ids.numel()).piece == 1
    assert all(torch.equal(a, b) for a, b in zip(whole, run(banks, ids, torch.float16), strict=True))


def test_rows_of_a_block_follow_the_slots_of_an_expert() -> None:
    """From 16 to 128, a power of two; the blocks are enough for any routing."""
    shape = BankShape(512, 2560, 160)
    rows = {slots: cut.Cut.of(shape, slots).rows for slots in (10, 1280, 8192, 8193, 10_240, 16_385, 40_960, 10**7)}
    assert rows == {10: 16, 1280: 16, 8192: 16, 8193: 32, 10_240: 32, 16_385: 64, 40_960: 128, 10**7: 128}
    assert cut.Cut.of(shape, 1280).blocks == 1280 // 16 + 512
    assert cut.Cut.of(shape, 10).blocks == 10


EVERY_BANK = [("tile32x8", metadata, group) for metadata in Metadata for group in (8, 20, 32, 64)]
EVERY_BANK += [("octet32", metadata, group) for metadata in Metadata for group in (8, 32)]


@pytest.mark.parametrize(("order", "metadata", "group"), EVERY_BANK)
def test_many_experts_decode_to_the_bits_of_each(order: str, metadata: Metadata, group: int) -> None:
    """Whatever stands where in a bank, groups that are no multiple of four rows' run included; duplicates too."""
    hidden = 320 if group == 20 else 128
    layer = SyntheticLayer(experts=4, hidden=hidden, intermediate=hidden, group=group)
    layout = BankLayout(order, metadata, group, True, True)
    banks = LegacyBackend().prepare(layer, layout, BankShape(4, hidden, hidden), "cpu")
    for bank in (banks.w13, banks.w2):
        many = bank.gather(torch.tensor([3, 0, 3]))
        for found, expert in zip(many, (3, 0, 3), strict=True):
            assert torch.equal(found.view(torch.int16), bank.dequantise(expert).view(torch.int16))


def test_banks_of_single_experts_are_asked_by_the_host(banks_of: Callable[..., Banks]) -> None:
    """A list of tensors cannot be indexed on a device."""
    banks = banks_of(SyntheticLayer(6, 64, 32, 32), batched=False)
    meta = experts.Call(*(torch.empty(1, 4, device="meta"),) * 4, None)
    assert not experts.on_device(banks, meta)
    assert experts.on_device(banks_of(SyntheticLayer(6, 64, 32, 32)), meta)
