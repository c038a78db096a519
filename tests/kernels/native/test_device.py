"""On a GPU: the package's own images load, launch on torch's stream, compute, and are captured in a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sm70_moe.kernels.build import INSTALLED
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.native.launch import Launcher, Step
from sm70_moe.kernels.native.refusal import LaunchRefused

pytestmark = pytest.mark.gpu

EXPERTS, WORDS, SLOTS = 6, 2_500, 5
BLOCKS = 4  # 160 threads x 5 loads x 16 bytes: the last block is not full


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    if Cubins.open(INSTALLED) is None:
        pytest.skip("this installation has no native build")
    return Launcher.open("cuda:0")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def checksum(launcher: Launcher, *, dependent: bool = False):
    step = Step("checksum", "checksum", grid=(BLOCKS, SLOTS), dependent=dependent)
    values = {"words": WORDS, "experts": EXPERTS}
    return launcher.program([step], varying=("ids", "bank", "out"), values=values)


def expected(bank: torch.Tensor, ids: list[int]) -> list[int]:
    """XOR over each expert's words, once, at the first slot that names it."""
    words = bank.cpu().numpy().view(np.uint32).reshape(EXPERTS, -1)
    first = [0 <= i < EXPERTS and i not in ids[:slot] for slot, i in enumerate(ids)]
    return [int(np.bitwise_xor.reduce(words[i])) if new else 0 for i, new in zip(ids, first, strict=True)]


def answer(out: torch.Tensor) -> list[int]:
    return [int(x) for x in np.bitwise_xor.reduce(out.cpu().numpy().view(np.uint32).reshape(SLOTS, BLOCKS), axis=1)]


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [5, 5, 0, 5, 0], [-1, 6, 3, 2**31 - 1, 3], [-1] * 5])
def test_every_chosen_word_is_read_once(launcher: Launcher, ids: list[int]) -> None:
    """Duplicates and invalid ids read nothing; poisoned results are overwritten."""
    bank = torch.randint(-(2**31), 2**31, (EXPERTS, WORDS * 4), dtype=torch.int32, device="cuda:0")
    out = torch.full((SLOTS * BLOCKS,), -1, dtype=torch.int32, device="cuda:0")
    named = torch.tensor(ids, dtype=torch.int32, device="cuda:0")
    checksum(launcher)(stream(), named.data_ptr(), bank.data_ptr(), out.data_ptr())
    assert answer(out) == expected(bank, ids)


def test_capture_and_replay(launcher: Launcher) -> None:
    """A graph of separator and checksum follows what the separator writes, on another stream than torch's default."""
    bank = torch.randint(-(2**31), 2**31, (EXPERTS, WORDS * 4), dtype=torch.int32, device="cuda:0")
    out = torch.full((SLOTS * BLOCKS,), -1, dtype=torch.int32, device="cuda:0")
    next_ids, ids = (torch.zeros(SLOTS, dtype=torch.int32, device="cuda:0") for _ in range(2))
    next_weights, weights = (torch.zeros(SLOTS, device="cuda:0") for _ in range(2))
    separator = launcher.program(
        [Step("roofline", "separator", grid=(1,))],
        varying=("from_ids", "from_weights", "ids", "weights"),
        values={"count": SLOTS},
    )
    reading = checksum(launcher)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        separator(stream(), *(t.data_ptr() for t in (next_ids, next_weights, ids, weights)))
        reading(stream(), ids.data_ptr(), bank.data_ptr(), out.data_ptr())
    for chosen in ([0, 1, 2, 3, 4], [5, 4, 5, -1, 2]):
        next_ids.copy_(torch.tensor(chosen, dtype=torch.int32))
        next_weights.copy_(torch.arange(SLOTS) + chosen[0])
        out.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert answer(out) == expected(bank, chosen)
        assert torch.equal(weights, next_weights)


def test_dependent_launch(launcher: Launcher) -> None:
    """Where the device can overlap kernels, the result is the same."""
    if int(launcher.architecture.removeprefix("sm_")) < 90:
        pytest.skip(f"{launcher.architecture} has no dependent launch")
    bank = torch.randint(-(2**31), 2**31, (EXPERTS, WORDS * 4), dtype=torch.int32, device="cuda:0")
    out = torch.full((SLOTS * BLOCKS,), -1, dtype=torch.int32, device="cuda:0")
    ids = torch.arange(SLOTS, dtype=torch.int32, device="cuda:0")
    for _ in range(3):
        checksum(launcher, dependent=True)(stream(), ids.data_ptr(), bank.data_ptr(), out.data_ptr())
    assert answer(out) == expected(bank, list(range(SLOTS)))


def test_a_launch_that_the_driver_refuses(launcher: Launcher) -> None:
    """Its words are in the error, and the device goes on working."""
    step = Step("roofline", "nothing", grid=(1,), threads=2048)  # no device has blocks of that size
    with pytest.raises(LaunchRefused, match="CUDA_ERROR"):
        launcher.program([step])(stream())
    launcher.program([Step("roofline", "nothing", grid=(1,))])(stream())
    torch.cuda.synchronize()


def test_shared_memory_beyond_the_device(launcher: Launcher) -> None:
    """It is refused when the program is made."""
    with pytest.raises(LaunchRefused, match="shared memory"):
        launcher.program([Step("roofline", "nothing", grid=(1,), shared=2**20)])
