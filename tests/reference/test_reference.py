from __future__ import annotations

import numpy as np
import pytest

from sm70_moe.evidence.synthetic import SyntheticLayer, pack
from sm70_moe.reference.arithmetic import AwqMatrix, Reference, nibbles

ALL = slice(None)


def one_column(code: int, zero: int, scale: int) -> float:
    """Bits of the decoded weight of one code, zero and FP16 scale (bits)."""
    row = np.zeros((1, 8), np.uint8)
    codes, zeros = row.copy(), row.copy()
    codes[0, 3], zeros[0, 3] = code, zero
    scales = np.full((1, 8), scale, np.uint16).view(np.float16)
    weight = AwqMatrix(pack(codes), pack(zeros), scales, 1).weights(ALL, slice(3, 4))
    return int(weight.astype(np.float16).view(np.uint16)[0, 0])


def test_nibble_order() -> None:
    """Codes 0..7 in columns 0..7 are the word 0x75316420 (CONTRACT 6), and unpack again."""
    word = pack(np.arange(8, dtype=np.uint8).reshape(1, 8))
    assert int(word.view(np.uint32)[0, 0]) == 0x75316420
    assert nibbles(word, ALL).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_negative_words() -> None:
    """A word whose sign bit is set unpacks like any other."""
    assert nibbles(np.array([[-1]], np.int32), ALL).tolist() == [[15] * 8]


@pytest.mark.parametrize(
    ("code", "zero", "scale", "expected"),
    [(1, 3, 0x068E, 0x8A8D), (3, 3, 0x211F, 0x0080), (0, 0, 0x3C00, 0x0000), (15, 0, 0xBC00, 0xCB80)],
)
def test_decoding_rounds_bias_and_sum(code: int, zero: int, scale: int, expected: int) -> None:
    """The rounding examples of CONTRACT 8, a zero code, and a negative scale."""
    assert one_column(code, zero, scale) == expected


def test_shapes_must_agree() -> None:
    """Scales with a row too few are refused with the shapes."""
    words, scales = np.zeros((64, 4), np.int32), np.zeros((1, 32), np.float16)
    with pytest.raises(ValueError, match=r"\(1, 32\)"):
        AwqMatrix(words, np.zeros((2, 4), np.int32), scales, 32)


def test_ranks_add_up_to_the_whole() -> None:
    """The exact slots of four ranks, where the cut falls inside groups, sum to those of one rank."""
    whole = SyntheticLayer(experts=3, hidden=80, intermediate=160, group=80, seed=1)
    x, ids = np.random.default_rng(0).normal(size=(2, 80)), np.array([[0, 2], [1, -1]])
    weights = np.ones((2, 2))
    alone = whole.reference.answer(x, ids, weights, "float32")
    parts = [Reference(whole.words, 3, slice(40 * r, 40 * r + 40)).answer(x, ids, weights, "float32") for r in range(4)]
    assert np.allclose(sum(p.slots for p in parts), alone.slots, rtol=1e-12, atol=1e-12)
    assert np.array_equal(np.concatenate([p.gate for p in parts], axis=2), alone.gate)


def test_every_rounding_point() -> None:
    """A one-by-one calculation in plain Python agrees with the answer in every stage."""
    layer = SyntheticLayer(experts=2, hidden=32, intermediate=32, group=32, seed=3)
    x = np.random.default_rng(1).normal(size=(1, 32)).astype(np.float16)
    weights = np.array([[0.7, -0.2]], np.float32)
    answer = layer.reference.answer(x, np.array([[1, 0]]), weights, "float16")
    total = np.float32(0)
    for slot, expert in enumerate((1, 0)):
        words = layer.words(expert)
        gate, up, down = (m.weights(ALL, ALL) for m in (words.gate, words.up, words.down))
        g = np.float16([sum(float(x[0, k]) * gate[k, n] for k in range(32)) for n in range(32)])
        u = np.float16([sum(float(x[0, k]) * up[k, n] for k in range(32)) for n in range(32)])
        s = np.float16(g.astype(np.float64) / (1 + np.exp(-g.astype(np.float64))))
        a = np.float16(s.astype(np.float64) * u.astype(np.float64))
        y = np.float16([sum(float(a[k]) * down[k, n] for k in range(32)) for n in range(32)])
        assert np.array_equal(answer.activations[0, slot], a.astype(np.float64))
        assert np.array_equal(answer.products[0, slot], y.astype(np.float64))
        # 24 + 11 bits and the sum: numpy's long double would do, plain FP64 has no tie here
        total = np.float32(float(weights[0, slot]) * y.astype(np.float64) + total)
    assert np.array_equal(answer.out[0], total.astype(np.float16).astype(np.float64))


def test_given_intermediate() -> None:
    """With a route's own intermediate W2 works on that, and W13 is unchanged."""
    layer = SyntheticLayer(experts=2, hidden=32, intermediate=32, group=32)
    x, ids, weights = np.ones((1, 32)), np.array([[0]]), np.ones((1, 1))
    own = layer.reference.answer(x, ids, weights, "float16")
    given = layer.reference.answer(x, ids, weights, "float16", np.zeros((1, 1, 32)))
    assert np.array_equal(own.gate, given.gate)
    assert not given.slots.any()
    assert own.slots.any()


def test_no_valid_slot() -> None:
    """Without a valid id no expert is read and the output is zero."""

    def never(expert: int) -> None:
        raise AssertionError(expert)

    answer = Reference(never, 4).answer(np.full((2, 8), np.nan), np.full((2, 3), -1), np.ones((2, 3)), "float16")  # type: ignore[arg-type]  # reads nothing
    assert answer.out.tolist() == np.zeros((2, 8)).tolist()


@pytest.mark.parametrize("columns", [slice(0, 24), slice(3, 4), slice(8, 16), slice(5, 19), slice(None)])
def test_columns_need_not_fill_words(columns: slice) -> None:
    """Any range of columns is cut out of the words that hold it."""
    values = np.random.default_rng(0).integers(0, 16, (5, 24), np.uint8)
    assert np.array_equal(nibbles(pack(values), columns), values[:, columns])
