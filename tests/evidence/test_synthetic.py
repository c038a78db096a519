from __future__ import annotations

import numpy as np
import pytest

from sm70_moe.evidence.synthetic import SyntheticLayer, draw, pack
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata

ALL = slice(None)


def test_same_seed_same_weights() -> None:
    """An expert depends on seed and number only, not on what was read before."""
    one, two = (SyntheticLayer(experts=4, hidden=32, intermediate=32, group=32, seed=9) for _ in range(2))
    two.read(1, 32)
    assert np.array_equal(one.words(3).up.qweight, two.words(3).up.qweight)
    assert not np.array_equal(one.words(3).up.qweight, one.words(2).up.qweight)
    other = SyntheticLayer(experts=4, hidden=32, intermediate=32, group=32, seed=8)
    assert not np.array_equal(one.words(3).up.qweight, other.words(3).up.qweight)


def test_every_code_and_zero_and_negative_scales() -> None:
    """The random numbers hold every code, every zero and both signs of scales."""
    numbers = draw(np.random.default_rng(0), (256, 64), 32)
    assert set(numbers.codes.flatten().tolist()) == set(numbers.zeros.flatten().tolist()) == set(range(16))
    assert (numbers.scales < 0).any()
    assert (numbers.scales > 0).any()


def test_words() -> None:
    """Codes 0..7 are the word 0x75316420; fifteens set every bit."""
    rows = np.array([range(8), [15] * 8], np.uint8)
    assert pack(rows).view(np.uint32).tolist() == [[0x75316420], [0xFFFFFFFF]]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("metadata", list(Metadata))
def test_banks_decode_to_the_reference(rank: int, metadata: Metadata) -> None:
    """Banks of re-grouped ranks hold, to the bit, the weights that the reference cuts from the whole matrix."""
    layer = SyntheticLayer(experts=2, hidden=64, intermediate=384, group=64, ranks=4, rank=rank, seed=4)
    layout = BankLayout("tile32x8", metadata, 32, True, True)
    banks = LegacyBackend().prepare(layer, layout, BankShape(2, 64, 96), "cpu")
    own, words = slice(96 * rank, 96 * rank + 96), layer.words(1)
    w13, w2 = (bank.dequantise(1).numpy().T for bank in (banks.w13, banks.w2))
    assert np.array_equal(w13[:, 0::2], words.gate.weights(ALL, own))
    assert np.array_equal(w13[:, 1::2], words.up.weights(ALL, own))
    assert np.array_equal(w2, words.down.weights(own, ALL))
