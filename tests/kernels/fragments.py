"""The tensor-core steps as the PTX manual draws them, and the kernels' lane maps, in numpy.

Nothing here is read from the CUDA sources: it is what they claim, written a second time. A lane is a
number 0..31; fragments are arrays with the lane first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LANES = np.arange(32)


def m16n8k16(a: Array, b: Array) -> Array:
    """a (32, 4, 2), b (32, 2, 2): registers of half pairs. Returns c (32, 4) of the 16 x 8 product."""
    rows, columns = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in LANES:
        group, place = lane >> 2, lane & 3
        for half in range(2):
            k = 2 * place + half
            rows[group, k], rows[group + 8, k] = a[lane, 0, half], a[lane, 1, half]
            rows[group, k + 8], rows[group + 8, k + 8] = a[lane, 2, half], a[lane, 3, half]
            columns[k, group], columns[k + 8, group] = b[lane, 0, half], b[lane, 1, half]
    product = rows @ columns
    c = np.zeros((32, 4))
    for lane in LANES:
        group, place = lane >> 2, lane & 3
        c[lane] = [product[group + 8 * (i >> 1), 2 * place + (i & 1)] for i in range(4)]
    return c


def m8n8k4(a: Array, b: Array) -> Array:
    """a, b (32, 2, 2): four products of 8 x 4 times 4 x 8, one for each quad pair. Returns c (32, 8)."""
    c = np.zeros((32, 8))
    for pair in range(4):
        members = [lane for lane in LANES if lane >> 2 & 3 == pair]
        rows, columns = np.zeros((8, 4)), np.zeros((4, 8))
        for lane in members:
            place = (lane & 3) + (lane >> 4) * 4
            rows[place], columns[:, place] = a[lane].reshape(4), b[lane].reshape(4)
        product = rows @ columns
        for lane in members:
            for i in range(8):
                row = (lane & 1) + (i & 2) + (4 if lane >= 16 else 0)
                c[lane, i] = product[row, (i & 4) + (lane & 2) + (i & 1)]
    return c


def own_row(lane: int) -> int:
    return lane >> 2


def own_quad(lane: int) -> int:
    return lane & 3


def volta_row(lane: int) -> int:
    return (lane & 3) | (lane >> 2 & 4)


def volta_quad(lane: int) -> int:
    return lane >> 2 & 3


def decode_word(word: int) -> list[tuple[int, int]]:
    """Codes of K (0,1), (2,3), (4,5), (6,7): what shifts and masks leave in the halves of a register."""
    upper = word >> 8
    parts = [word & 0x000F000F, (word & 0x00F000F0) >> 4, upper & 0x000F000F, (upper & 0x00F000F0) >> 4]
    return [(part & 0xFFFF, part >> 16) for part in parts]


def m16n8k8(a: Array, b: Array) -> Array:
    """TF32. a (32, 4), b (32, 2): a number a register. Returns c (32, 4) of the 16 x 8 product."""
    rows, columns = np.zeros((16, 8)), np.zeros((8, 8))
    for lane in LANES:
        group, place = lane >> 2, lane & 3
        rows[group, place], rows[group + 8, place] = a[lane, 0], a[lane, 1]
        rows[group, place + 4], rows[group + 8, place + 4] = a[lane, 2], a[lane, 3]
        columns[place, group], columns[place + 4, group] = b[lane]
    product = rows @ columns
    c = np.zeros((32, 4))
    for lane in LANES:
        group, place = lane >> 2, lane & 3
        c[lane] = [product[group + 8 * (i >> 1), 2 * place + (i & 1)] for i in range(4)]
    return c
