"""Row words made without unpacking are the words that unpacking and packing give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.numbers.rowwords import reordered, row_words, swap, transposed, unpack_rows
from sm70_moe.numbers.words import Order, pack

COUNTS = st.integers(1, 6)
SEEDS = st.integers(0, 2**32 - 1)
ORDERS = st.permutations(range(8)).map(tuple)


def codes_of(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 16, (rows, columns), dtype=np.uint8))


def test_a_row_word() -> None:
    """Rows 0 to 7 with codes 1 to 8: even rows in the lower half, odd ones in the upper."""
    codes = torch.arange(1, 9, dtype=torch.uint8).view(8, 1)
    assert row_words(codes).item() == 0x86427531 - 2**32


@given(COUNTS, COUNTS, SEEDS)
def test_packing_and_unpacking_are_inverse(words: int, columns: int, seed: int) -> None:
    """Any K that is a multiple of 8, any N."""
    codes = codes_of(8 * words, columns, seed)
    assert torch.equal(unpack_rows(row_words(codes).t().contiguous()), codes.t().short())


@given(COUNTS, COUNTS, ORDERS, SEEDS)
def test_words_of_columns_are_transposed(words: int, width: int, order: Order, seed: int) -> None:
    """Eight columns in a word, in any order of nibbles."""
    codes = codes_of(8 * words, 8 * width, seed)
    stored = pack(codes.view(8 * words, width, 8), order)
    assert torch.equal(transposed(stored, order), row_words(codes))


@given(COUNTS, COUNTS, ORDERS, SEEDS)
def test_words_of_rows_are_reordered(words: int, columns: int, order: Order, seed: int) -> None:
    """Eight rows in a word, in any order of nibbles."""
    codes = codes_of(8 * words, columns, seed)
    stored = pack(codes.view(words, 8, columns).transpose(1, 2), order)
    assert torch.equal(reordered(stored, order), row_words(codes))


def test_inputs_are_left_alone() -> None:
    """Both directions work on copies: the words may be an engine's own."""
    stored = torch.arange(64, dtype=torch.int32).view(16, 4) - 32
    before = stored.clone()
    transposed(stored, (0, 4, 1, 5, 2, 6, 3, 7))
    reordered(stored, (0, 1, 2, 3, 4, 5, 6, 7))
    assert torch.equal(stored, before)


@pytest.mark.parametrize("width", [1, 3])
def test_swapping_in_a_tensor_is_swapping_in_an_array(width: int) -> None:
    """On a GPU there is no numpy: the same operations on tensors."""
    words = torch.randint(-(2**31), 2**31, (8, 2, width), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    array, tensor = words.clone(), words.clone()
    swap(array.numpy())
    swap(tensor)
    assert torch.equal(array, tensor)
    assert not torch.equal(tensor, words)
    swap(tensor)
    assert torch.equal(tensor, words)
