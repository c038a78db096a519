from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.errors import BackendError
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.kernels.arguments import address_range, overlaps_itself, shares_memory
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.portable.legacy import LegacyBackend

LAYER = SyntheticLayer(experts=2, hidden=64, intermediate=32, group=32)


def arguments(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """A good call of four tokens with two slots, except for what is changed."""
    good = {
        "x": torch.ones(4, 64).half(),
        "ids": torch.zeros(4, 2, dtype=torch.int32),
        "weights": torch.ones(4, 2),
        "out": torch.empty(4, 64).half(),
        "intermediate": torch.empty(4, 2, 32).half(),
    }
    return {**good, **changed}


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("x", torch.ones(4, 63).half(), "(4, 63)"),
        ("x", torch.ones(64).half(), "(64,)"),
        ("x", torch.ones(()).half(), "()"),
        ("x", torch.ones(4, 64).double(), "float64"),
        ("ids", torch.zeros(4, dtype=torch.int32), "(4,)"),
        ("ids", torch.zeros(3, 2, dtype=torch.int32), "(3, 2)"),
        ("ids", torch.zeros(4, 2, dtype=torch.int64), "int64"),
        ("weights", torch.ones(4, 3), "(4, 3)"),
        ("weights", torch.ones(4, 2).half(), "float16"),
        ("out", torch.empty(4, 64), "float32"),
        ("out", torch.empty(5, 64).half(), "(5, 64)"),
        ("out", torch.empty(4, 64, device="meta").half(), "meta"),
        ("intermediate", torch.empty(4, 2, 64).half(), "(4, 2, 64)"),
        ("intermediate", torch.empty(4, 2, 32).bfloat16(), "bfloat16"),
    ],
)
def test_misfit_is_refused_by_name(banks_of: Callable[..., Banks], name: str, tensor: torch.Tensor, found: str) -> None:
    """A wrong shape, dtype or device is refused with the argument and what was found."""
    with pytest.raises(BackendError) as refused:
        LegacyBackend().run(banks_of(LAYER), Call(**arguments(**{name: tensor})))
    assert str(refused.value).startswith(f"{name}:")
    assert found in str(refused.value)


def test_nothing_is_written_when_refused(banks_of: Callable[..., Banks]) -> None:
    """A refused call leaves the output alone."""
    given = arguments(out=torch.full((4, 64), 7.0).half(), weights=torch.ones(4, 3))
    with pytest.raises(BackendError):
        LegacyBackend().run(banks_of(LAYER), Call(**given))
    assert (given["out"] == 7).all()


def overlapping() -> list[Any]:
    memory = torch.zeros(4096, dtype=torch.int32)
    half, full = memory.view(torch.float16), memory.view(torch.float32)
    x, out = half[:256].view(4, 64), half[192:448].view(4, 64)
    inner = half[256:512].view(4, 2, 32)
    return [
        ("out", "x", {"x": x, "out": x}),
        ("out", "x", {"x": x, "out": out}),
        ("out", "ids", {"ids": memory[100:108].view(4, 2), "out": x.view(4, 64)} | {"out": half[:256].view(4, 64)}),
        ("out", "weights", {"weights": full[100:108].view(4, 2), "out": half[:256].view(4, 64)}),
        ("intermediate", "x", {"x": half[256:512].view(4, 64), "intermediate": inner}),
        ("intermediate", "out", {"out": out, "intermediate": inner}),
    ]


@pytest.mark.parametrize(("name", "other", "changed"), overlapping())
def test_overlap_is_refused(
    banks_of: Callable[..., Banks], name: str, other: str, changed: dict[str, torch.Tensor]
) -> None:
    """An output that shares memory with an input or the other output is refused; both are named."""
    if name == "out" and other == "ids":
        changed = {**changed, "ids": changed["ids"].zero_()}
    with pytest.raises(BackendError) as refused:
        LegacyBackend().run(banks_of(LAYER), Call(**arguments(**changed)))
    assert str(refused.value).startswith(f"{name}:")
    assert f"overlaps {other}" in str(refused.value)


@pytest.mark.parametrize("batched", [True, False])
def test_output_inside_the_weights_is_refused(banks_of: Callable[..., Banks], batched: bool) -> None:
    """An output that lies in a bank is refused."""
    banks = banks_of(LAYER, batched=batched)
    inside = banks.w2.planes["words"][1].view(torch.float16).flatten()[:256].view(4, 64)
    with pytest.raises(BackendError, match="weights"):
        LegacyBackend().run(banks, Call(**arguments(out=inside)))


def test_output_on_itself_is_refused(banks_of: Callable[..., Banks]) -> None:
    """An expanded output would be written several times."""
    with pytest.raises(BackendError, match="out"):
        LegacyBackend().run(banks_of(LAYER), Call(**arguments(out=torch.empty(1, 64).half().expand(4, 64))))


def test_neighbours_do_not_overlap(banks_of: Callable[..., Banks]) -> None:
    """Buffers that touch without a common byte are fine."""
    memory = torch.zeros(512).half()
    x, out = memory[:256].view(4, 64), memory[256:].view(4, 64)
    assert not shares_memory(x, out)
    assert address_range(x)[1] == address_range(out)[0]
    LegacyBackend().run(banks_of(LAYER), Call(**arguments(x=x, out=out)))


def test_empty_tensors_overlap_nothing() -> None:
    """A tensor without elements has no memory."""
    memory = torch.zeros(8)
    assert not shares_memory(memory[:0], memory)


@pytest.mark.parametrize(
    ("shape", "strides", "inside"),
    [
        ((4, 8), (8, 1), False),
        ((4, 8), (1, 4), False),
        ((4, 8), (16, 2), False),
        ((4, 8), (1, 1), True),
        ((4, 8), (7, 1), True),
        ((4, 8), (0, 1), True),
        ((1, 8), (0, 1), False),
    ],
)
def test_a_tensor_may_overlap_itself(shape: tuple[int, int], strides: tuple[int, int], inside: bool) -> None:
    """Rows that run into each other are found by their strides."""
    assert overlaps_itself(torch.empty(256).as_strided(shape, strides)) is inside
