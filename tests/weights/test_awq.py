"""AWQ words, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import CheckpointError
from sm70_moe.weights.awq import (
    decode,
    pack_weights,
    pack_zeros,
    unpack_weights,
    unpack_zeros,
)

COLUMNS = torch.arange(8, dtype=torch.uint8).view(1, 8)


def test_codes_in_order_give_the_contracts_word() -> None:
    """Codes 0..7 in columns 0..7 are the word 0x75316420."""
    assert pack_weights(COLUMNS).tolist() == [[0x75316420]]
    assert unpack_weights(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_zeros_in_order_give_the_same_word() -> None:
    """Zeros use the same order, and nothing is added to them."""
    assert pack_zeros(COLUMNS).tolist() == [[0x75316420]]
    assert unpack_zeros(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(("column", "nibble"), list(enumerate((0, 4, 1, 5, 2, 6, 3, 7))))
def test_every_column_has_its_nibble(column: int, nibble: int) -> None:
    """A single 15 in one column lands in one nibble, for weights and for zeros, sign bit included."""
    codes = torch.zeros(1, 8, dtype=torch.uint8)
    codes[0, column] = 15
    word = (15 << (4 * nibble)) - (2**32 if nibble == 7 else 0)
    assert pack_weights(codes).item() == word
    assert pack_zeros(codes).item() == word
    assert torch.equal(unpack_weights(torch.tensor([[word]], dtype=torch.int32)), codes)
    assert torch.equal(unpack_zeros(torch.tensor([[word]], dtype=torch.int32)), codes)


def test_negative_words_do_not_leak_their_sign() -> None:
    """-1 is fifteen everywhere; the smallest INT32 is an 8 in the last column alone."""
    words = torch.tensor([[-1, -(2**31)]], dtype=torch.int32)
    assert unpack_weights(words).tolist() == [[15] * 8 + [0] * 7 + [8]]
    assert unpack_zeros(words).tolist() == [[15] * 8 + [0] * 7 + [8]]


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_packing_and_unpacking_are_inverse(rows: int, words: int, seed: int) -> None:
    """For any geometry and any words, both ways."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 16, (rows, 8 * words), dtype=np.uint8))
    assert torch.equal(unpack_weights(pack_weights(codes)), codes)
    assert torch.equal(unpack_zeros(pack_zeros(codes)), codes)
    packed = torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, words), dtype=np.int32))
    assert torch.equal(pack_weights(unpack_weights(packed)), packed)


def test_strided_words_unpack_as_they_stand() -> None:
    """An engine may hold a view of a larger tensor."""
    whole = torch.arange(40, dtype=torch.int32).view(4, 10)
    assert torch.equal(unpack_weights(whole[:, 2:6]), unpack_weights(whole[:, 2:6].contiguous()))


def test_decode_repeats_groups_and_fills_in_symmetric_zeros() -> None:
    """Rows of scales are taken by number; without zeros each is 8."""
    scales = torch.tensor([[1.0] * 8, [-2.0] * 8], dtype=torch.float16)
    codes = decode(torch.zeros(4, 1, dtype=torch.int32), None, scales, (0, 1, 1))
    assert codes.scales[:, 0].tolist() == [1.0, -2.0, -2.0]
    assert codes.zeros.tolist() == [[8] * 8] * 3


@pytest.mark.parametrize(("index", "name"), list(enumerate(("qweight", "qzeros", "scales"))))
def test_decode_refuses_another_dtype(index: int, name: str) -> None:
    """Scales in BF16 have lost bits that the checkpoint had."""
    given = [
        torch.zeros(8, 1, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, 8, dtype=torch.float16),
    ]
    given[index] = given[index].to(torch.bfloat16)
    with pytest.raises(CheckpointError) as caught:
        decode(given[0], given[1], given[2], (0,))
    assert name in str(caught.value)
    assert "bfloat16" in str(caught.value)
