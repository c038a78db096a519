"""Random banks: the reference reads what is in them, and they fit where they have to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sm70_moe.benchmark.weights import HEADROOM, how_many, random_banks, reference_of
from sm70_moe.errors import BackendError
from sm70_moe.evidence.trial import Inputs, Trial
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata

FIRST = BankShape(experts=512, hidden=2560, intermediate=160)
SHAPE = BankShape(experts=40, hidden=128, intermediate=64)


def layout(metadata: str = "4-byte", order: str = "octet32", interleaved: bool = True) -> BankLayout:
    return BankLayout(order, Metadata(metadata), 32, interleaved, True)


@pytest.mark.parametrize("metadata", ["4-byte", "3-byte", "2.5-byte"])
@pytest.mark.parametrize("order", ["octet32", "tile32x8"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_reference_reads_what_is_in_them(metadata: str, order: str, interleaved: bool) -> None:
    """The portable route on such banks keeps its bounds; experts of every chunk are filled."""
    banks = random_banks(layout(metadata, order, interleaved), SHAPE, "cpu", 3)
    banks.require_complete()
    call = Inputs.random(3, 4, hidden=128, experts=40, seed=1)
    run = lambda given: LegacyBackend().run(banks, given)  # noqa: E731  # the banks bound
    assert Trial("legacy", "legacy", run, reference_of(banks), 64).judge(call).ok


def test_numbers_are_sane() -> None:
    """Deviation 1/sqrt(K), both signs, no expert like another; same seed, same bits."""
    one, same, other = (random_banks(layout(), SHAPE, "cpu", seed) for seed in (3, 3, 4))
    weights = one.w13.dequantise(0).float()
    assert weights.std().item() == pytest.approx(128**-0.5, rel=0.15)
    for name, plane in one.w13.planes.items():
        assert torch.equal(plane, same.w13.planes[name])
        assert not torch.equal(plane, other.w13.planes[name])
    assert len({one.w2.dequantise(e).numpy().tobytes() for e in range(40)}) == 40
    assert np.isfinite(one.w2.dequantise(39).numpy()).all()


@pytest.mark.parametrize(("gigabytes", "banks"), [(16, 12), (32, 12), (4, 8), (2, 2)])
def test_as_many_banks_as_fit(gigabytes: int, banks: int) -> None:
    """Twelve at most: those of 16 GB hold them."""
    assert how_many(gigabytes * 2**30, layout(), FIRST) == banks


def test_banks_that_do_not_fit() -> None:
    """What is free and what is needed."""
    with pytest.raises(BackendError, match=r"1\.46 GiB.* 2 banks of 375\.0 MiB.* 1\.73 GiB"):
        how_many(1_570_000_000, layout(), FIRST)
    with pytest.raises(BackendError, match="12 banks"):
        how_many(HEADROOM + 3 * 393_216_000, layout(), FIRST, 12)
    assert how_many(HEADROOM + 3 * 393_216_000, layout(), FIRST, 3) == 3
