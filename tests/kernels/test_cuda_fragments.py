"""The decode kernels' index maps, emulated in numpy on words that the package itself packs."""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sm70_moe.banks import octets

Array = NDArray[Any]


def beside(name: str) -> ModuleType:
    """A module of this folder: tests are not a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lanes = beside("fragments")

UNIT = 32  # K of one 16-byte load


@pytest.fixture
def matrix() -> tuple[Array, Array]:
    """Codes (K = 512, 8 columns) and their words (K/32, 8, 4) as unsigned numbers."""
    words = np.random.default_rng(1).integers(0, 2**32, (16, 8, 4), np.uint32)
    codes = octets.PACKING.unpack(torch.from_numpy(words.view(np.int32)[None]), 8).numpy().T
    return codes, words


def halves(word: int) -> Array:
    """Register pairs of one word: (pair of K, half)."""
    return np.array(lanes.decode_word(int(word)), np.float64)


def operand(x: Array, unit: int, word: int) -> Array:
    """The 16 bytes of activations that go with a word: (pair of K, half)."""
    return x[unit * UNIT + 8 * word : unit * UNIT + 8 * word + 8].reshape(4, 2)


def test_words_decode_to_consecutive_k(matrix: tuple[Array, Array]) -> None:
    """Masks and shifts give K (0,1), (2,3), (4,5), (6,7) of a word, in the order of the activations."""
    codes, words = matrix
    for unit, column, word in product(range(16), range(8), range(4)):
        k = unit * UNIT + 8 * word
        assert halves(words[unit, column, word]).reshape(8).tolist() == codes[k : k + 8, column].tolist()


def test_w13_step_with_two_parts_in_a_warp(matrix: tuple[Array, Array]) -> None:
    """m16n8k16: rows 8 to 15 are the next part; token t has columns 2t and 2t + 1; lane (row, t) ends
    with the sums of both parts in its first and last accumulator."""
    codes, words = matrix
    x = np.random.default_rng(2).integers(-8, 8, (4, 512)).astype(np.float64)
    sums = np.zeros((32, 4))
    for quads, word, half in product(range(2), range(4), range(2)):
        a, b = np.zeros((32, 4, 2)), np.zeros((32, 2, 2))
        for lane in lanes.LANES:
            row, quad = lanes.own_row(lane), lanes.own_quad(lane)
            for part in range(2):
                pairs = halves(words[8 * part + 4 * quads + quad, row, word])
                a[lane, part], a[lane, part + 2] = pairs[2 * half], pairs[2 * half + 1]
            token, part = row >> 1, row & 1
            b[lane] = operand(x[token], 8 * part + 4 * quads + quad, word)[2 * half : 2 * half + 2]
        sums += lanes.m16n8k16(a, b)
    for lane in lanes.LANES:
        row, token = lanes.own_row(lane), lanes.own_quad(lane)
        for part, accumulator in ((0, 0), (1, 3)):
            k = slice(256 * part, 256 * part + 256)
            assert sums[lane, accumulator] == x[token, k] @ codes[k, row]


def test_a_pair_in_tf32_is_half_a_step_in_fp16() -> None:
    """`step_pair`: two m16n8k8 give the accumulators of one m16n8k16, with both K of a pair in one step."""
    source = np.random.default_rng(6)
    a, b = source.integers(-8, 8, (32, 4, 2)).astype(float), source.integers(-8, 8, (32, 2, 2)).astype(float)
    pairs = [
        lanes.m16n8k8(np.stack((a[:, p, 0], a[:, p + 1, 0], a[:, p, 1], a[:, p + 1, 1]), 1), b[:, p // 2])
        for p in (0, 2)
    ]
    assert np.array_equal(pairs[0] + pairs[1], lanes.m16n8k16(a, b))


@pytest.mark.parametrize("bits", [0x0001, 0x03FF, 0x0400, 0x3555, 0x7BFF, 0x8001, 0xFBFF])
def test_tf32_holds_every_half(bits: int) -> None:
    """FP16 weights, subnormal ones too, have no bit below TF32's ten; BF16 has seven."""
    single = np.array(bits, np.uint16).view(np.float16).astype(np.float32)
    assert int(single.view(np.uint32)) & 0x1FFF == 0
    assert int(np.array(bits << 16, np.uint32)) & 0x1FFF == 0


def test_w13_step_of_volta(matrix: tuple[Array, Array]) -> None:
    """m8n8k4: each quad pair sums its own units; tokens are the columns; the four sums make a part."""
    codes, words = matrix
    x = np.random.default_rng(3).integers(-8, 8, (8, 512)).astype(np.float64)
    sums = np.zeros((32, 8))
    for quads, word, half in product(range(4), range(4), range(2)):
        a, b = np.zeros((32, 2, 2)), np.zeros((32, 2, 2))
        for lane in lanes.LANES:
            row, quad = lanes.volta_row(lane), lanes.volta_quad(lane)
            a[lane] = halves(words[4 * quads + quad, row, word])[2 * half : 2 * half + 2]
            b[lane] = operand(x[row], 4 * quads + quad, word)[2 * half : 2 * half + 2]
        sums += lanes.m8n8k4(a, b)
    reduced = reduce_quads(sums)
    for lane in lanes.LANES:
        row = (lane & 1) | (lane >> 2 & 2) | (lane >> 2 & 4)
        for i in range(2):
            assert reduced[lane, i] == x[(lane & 6) + i] @ codes[:, row]


def reduce_quads(c: Array) -> Array:
    """`sum_quads` of tensor.cuh: two exchanges, after which each lane keeps two sums of all four pairs."""
    c = c.copy()
    for bit, keep in ((4, 4), (8, 2)):
        kept, given_away = np.zeros((32, keep)), np.zeros((32, keep))
        for lane in lanes.LANES:
            first, second = c[lane, :keep], c[lane, keep : 2 * keep]
            kept[lane], given_away[lane] = (second, first) if lane & bit else (first, second)
        c = kept + given_away[lanes.LANES ^ bit]
    return c


def test_w2_step_keeps_slots_apart(matrix: tuple[Array, Array]) -> None:
    """m16n8k16: eight units of eight slots meet in one step; slot r has column r to itself, because only
    the quad of its place gives activations. Lane (row, q) ends with slots 2q and 2q + 1."""
    codes, words = matrix
    x = np.random.default_rng(4).integers(-8, 8, (8, UNIT)).astype(np.float64)
    sums = np.zeros((32, 4))
    for word, half in product(range(4), range(2)):
        a, b = np.zeros((32, 4, 2)), np.zeros((32, 2, 2))
        for lane in lanes.LANES:
            row, quad = lanes.own_row(lane), lanes.own_quad(lane)
            for s in range(2):  # slot 4 s + quad has unit 4 s + quad
                pairs = halves(words[4 * s + quad, row, word])
                a[lane, s], a[lane, s + 2] = pairs[2 * half], pairs[2 * half + 1]
            if quad == row & 3:
                b[lane] = operand(x[row], 0, word)[2 * half : 2 * half + 2]
        sums += lanes.m16n8k16(a, b)
    for lane in lanes.LANES:
        row, quad = lanes.own_row(lane), lanes.own_quad(lane)
        two = sums[lane, :2] if quad < 2 else sums[lane, 2:]
        for slot, found in zip((2 * quad, 2 * quad + 1), two, strict=True):
            assert found == x[slot] @ codes[slot * UNIT : slot * UNIT + UNIT, row]


def test_w2_step_of_volta(matrix: tuple[Array, Array]) -> None:
    """m8n8k4: each quad pair has a slot, its activations in column 0; rows `row & 5` and two further are
    in accumulators 0 and 2 of the lanes without bit 1."""
    codes, words = matrix
    x = np.random.default_rng(5).integers(-8, 8, (4, UNIT)).astype(np.float64)
    sums = np.zeros((32, 8))
    for word, half in product(range(4), range(2)):
        a, b = np.zeros((32, 2, 2)), np.zeros((32, 2, 2))
        for lane in lanes.LANES:
            row, quad = lanes.volta_row(lane), lanes.volta_quad(lane)
            a[lane] = halves(words[quad, row, word])[2 * half : 2 * half + 2]
            if row == 0:
                b[lane] = operand(x[quad], 0, word)[2 * half : 2 * half + 2]
        sums += lanes.m8n8k4(a, b)
    for lane in lanes.LANES:
        if lane & 2:
            continue
        row, quad = lanes.volta_row(lane), lanes.volta_quad(lane)
        for accumulator, column in ((0, row & 5), (2, (row & 5) | 2)):
            assert sums[lane, accumulator] == x[quad] @ codes[quad * UNIT : quad * UNIT + UNIT, column]


@given(code=st.integers(0, 15), high=st.booleans())
def test_codes_are_exact_before_they_are_scaled(code: int, high: bool) -> None:
    """1024 + q - 1024, and (1024 + 16 q) / 16 - 64 in one rounding, are q."""
    word = np.uint16(0x6400 | (code << 4 if high else code))
    value = float(word.view(np.float16))
    assert value == (1024 + 16 * code if high else 1024 + code)
    assert (np.float16(value / 16 - 64) if high else np.float16(value) - np.float16(1024)) == code


SLOTS = st.lists(st.integers(-1, 5), min_size=1, max_size=40)


@given(ids=SLOTS, top_k=st.integers(1, 10))
def test_every_slot_is_served_once(ids: list[int], top_k: int) -> None:
    """`scan` of decode_w13.cu: blocks that serve an expert cover each of its slots exactly once, four tokens
    a block, and blocks of other slots leave."""
    rows = [ids[i : i + top_k] for i in range(0, len(ids) - len(ids) % top_k, top_k)][:8]
    flat = [expert for row in rows for expert in row]
    covered = [0] * len(flat)
    for slot, expert in enumerate(flat):
        for served in block(rows, slot, expert) if expert >= 0 else ():
            covered[served] += 1
    assert covered == [int(expert >= 0) for expert in flat]


def block(rows: list[list[int]], slot: int, expert: int) -> list[int]:
    """Slots that the block of `slot` writes."""
    top_k, token = len(rows[0]), slot // len(rows[0])
    mine = [[t * top_k + i for i, other in enumerate(row) if other == expert] for t, row in enumerate(rows)]
    active = [t for t, slots in enumerate(mine) if slots]
    rank = active.index(token)
    if rank % 4 or mine[token][0] != slot:
        return []
    return [served for t in active[rank : rank + 4] for served in mine[t]]
