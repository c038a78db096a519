"""How many octets of columns a block takes."""

from __future__ import annotations

import pytest

from sm70_moe.kernels.native import octets
from sm70_moe.kernels.native.octets import Sizes

FIRST, TOKENS = (2560, 160, 512, 10), (1, 2, 3, 4, 8)


@pytest.mark.parametrize(
    ("layer", "w13", "w2"),
    [
        (FIRST, (1, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
        ((2048, 768, 128, 8), (1, 6, 1, 1, 1), (1, 2, 2, 1, 1)),
        ((2048, 704, 64, 6), (1, 4, 1, 1, 1), (1, 1, 1, 2, 4)),
        ((4096, 352, 128, 8), (1, 6, 1, 1, 1), (1, 1, 1, 1, 1)),
        ((4096, 3584, 8, 2), (1, 14, 1, 8, 8), (2, 4, 1, 1, 1)),
    ],
)
def test_only_layers_that_come_in_waves_are_streamed(
    layer: tuple[int, int, int, int], w13: tuple[int, ...], w2: tuple[int, ...]
) -> None:
    """As measured: by H, I, E, k and tokens 1, 2, 3, 4, 8. The first contract keeps a block for each octet."""
    every = [Sizes(*layer, tokens) for tokens in TOKENS]
    assert tuple(octets.of_w13(sizes) for sizes in every) == w13
    assert tuple(octets.of_w2(sizes) for sizes in every) == w2


@pytest.mark.parametrize(
    ("inner", "top_k", "units"),
    [(160, 10, 1), (256, 8, 1), (352, 8, 2), (512, 10, 4), (704, 6, 4), (3584, 2, 4), (14336, 2, 8), (16384, 16, 28)],
)
def test_runs_of_a_slot_fit_shared_memory(inner: int, top_k: int, units: int) -> None:
    """Units of a run; sums of four tokens' runs, 32 bytes each, stay below 43 KB."""
    assert octets.run_units(inner // 32, top_k) == units
    assert 4 * top_k * -(-inner // 32 // units) * 32 <= 43 * 1024
