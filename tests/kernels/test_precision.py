from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from sm70_moe.kernels.portable.precision import full_fp32, read_switches


@pytest.fixture
def lowered() -> Iterator[tuple[str, ...]]:
    """A process whose host asked for reduced FP32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield read_switches()
    torch.set_float32_matmul_precision(before)


FULL = ("ieee", "ieee")


def test_full_inside_and_restored_after(lowered: tuple[str, ...]) -> None:
    """Inside, products are FP32; afterwards the host's own setting is back, also after an error."""
    assert lowered != FULL
    with full_fp32("cpu"):
        assert read_switches() == FULL
    assert read_switches() == lowered
    with pytest.raises(KeyError), full_fp32("cpu"):
        raise KeyError
    assert read_switches() == lowered
    assert torch.get_float32_matmul_precision() == "medium"


def test_nested_and_overlapping_users(lowered: tuple[str, ...]) -> None:
    """The last user out restores the switches, in whatever order two threads leave."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_fp32("cpu"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with full_fp32("cpu"):
        thread.start()
        inside.wait(10)
    assert read_switches() == FULL
    leave.set()
    thread.join()
    assert read_switches() == lowered


def test_nothing_is_touched_where_precision_is_full() -> None:
    """A process with full precision keeps its switches as they were."""
    before = read_switches()
    with full_fp32("cpu"):
        assert read_switches() == before
    assert read_switches() == before


def test_fp16_products_are_summed_in_fp32_and_the_switch_comes_back() -> None:
    """torch may add parts of an FP16 product in FP16, and does by default; splitting a sum is another switch."""
    place = torch.backends.cuda.matmul
    before = place.allow_fp16_reduced_precision_reduction
    try:
        for setting in (True, False, (True, True)):
            place.allow_fp16_reduced_precision_reduction = setting
            asked = place.allow_fp16_reduced_precision_reduction
            split = getattr(place, "allow_fp16_reduced_precision_reduction_split_k", None)
            with full_fp32("cpu"), full_fp32("cpu"):
                assert place.allow_fp16_reduced_precision_reduction is False
                assert place.allow_fp16_accumulation is False
            assert place.allow_fp16_reduced_precision_reduction is asked
            assert getattr(place, "allow_fp16_reduced_precision_reduction_split_k", None) is split
    finally:
        place.allow_fp16_reduced_precision_reduction = before


def test_autocast_and_gradients_are_off() -> None:
    """Autocast would turn FP32 products into BF16 ones; gradients would keep every decoded expert."""
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
        with full_fp32("cpu"):
            product = a @ b
    assert product.dtype == torch.float32
    assert not product.requires_grad
