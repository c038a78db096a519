"""The barrier of decode_fused.cu as a model: every order of blocks, grids of changing sizes, a word that wraps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.kernels.build import SOURCES
from sm70_moe.kernels.native.steps import MOST_BLOCKS

ARRIVALS = 1 << 16
WORD = 1 << 32


@dataclass
class Barrier:
    """The word in the layer's scratch, 32 bits."""

    word: int = 0

    @property
    def generation(self) -> int:
        return self.word >> 16

    @property
    def arrivals(self) -> int:
        return self.word % ARRIVALS

    def arrive(self, block: int, blocks: int) -> None:
        share = 1 if block else ARRIVALS - (blocks - 1)
        self.word = (self.word + share) % WORD


@dataclass
class Launch:
    """One launch: blocks as generators that stop where other blocks may come between.

    `arrived` counts blocks, `early` those that went on before all had.
    """

    barrier: Barrier
    blocks: int
    arrived: int = 0
    early: int = 0
    running: list[Iterator[bool]] = field(init=False)

    def __post_init__(self) -> None:
        self.running = [self.block(number) for number in range(self.blocks)]

    def block(self, number: int) -> Iterator[bool]:
        """Yields True where it can go on, False where it waits."""
        yield True  # it may start when others have arrived already
        before = self.barrier.generation
        yield True  # its tasks of W13
        self.barrier.arrive(number, self.blocks)
        self.arrived += 1
        yield True
        while self.barrier.generation == before:
            yield False
        self.early += self.arrived < self.blocks


def run(launches: list[Launch], choices: st.DataObject) -> None:
    """Blocks of all launches in any order; fails where all of them wait."""
    running = [block for launch in launches for block in launch.running]
    stuck = 0  # turns since anything happened
    while running:
        # once all could be waiting, everyone has a turn before they are called stuck
        at = choices.draw(st.integers(0, len(running) - 1)) if stuck == 0 else stuck % len(running)
        state = next(running[at], None)
        stuck = stuck + 1 if state is False else 0
        if state is None:
            del running[at]
        assert stuck <= 2 * len(running), "all blocks wait for each other"


GRIDS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(GRIDS, st.integers(0, 0xFFFF), st.data())
def test_changed_grids_one_after_the_other(grids: list[int], generation: int, choices: st.DataObject) -> None:
    """From any generation, also the last one before the word wraps: nobody is early, and no arrivals are left."""
    barrier = Barrier(generation << 16)
    for count, blocks in enumerate(grids):
        launch = Launch(barrier, blocks)
        run([launch], choices)
        assert (launch.arrived, launch.early, barrier.arrivals) == (blocks, 0, 0)
        assert barrier.generation == (generation + count + 1) % ARRIVALS


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 0xFFFF), st.data())
def test_two_launches_at_once(first: int, second: int, generation: int, choices: st.DataObject) -> None:
    """Two streams on one layer are not allowed and may compute nonsense, but nobody hangs, and no arrivals are left."""
    barrier = Barrier(generation << 16)
    run([Launch(barrier, first), Launch(barrier, second)], choices)
    assert barrier.arrivals == 0


@pytest.mark.parametrize("blocks", [1, 2, 400, MOST_BLOCKS])
@pytest.mark.parametrize("first", [True, False])
def test_only_the_last_arrival_carries(blocks: int, first: bool) -> None:
    """Block 0 as the first and as the last one, up to the most blocks that 16 bits can count."""
    barrier = Barrier(0xFFFF_0000)
    order = range(blocks) if first else reversed(range(blocks))
    generations = []
    for block in order:
        barrier.arrive(block, blocks)
        generations.append(barrier.generation)
    assert generations == [0xFFFF] * (blocks - 1) + [0]
    assert barrier.word == 0


@given(GRIDS)
def test_waiting_for_a_number_of_arrivals(grids: list[int]) -> None:
    """Why it is a generation: a count that is never reset is a whole number of blocks for one size of grid only."""
    arrived = 0
    for blocks in grids:
        goals = [((arrived + place) // blocks + 1) * blocks for place in range(blocks)]
        arrived += blocks
        hangs = max(goals) > arrived
        assert hangs == (arrived % blocks != 0)


def test_the_source_has_these_numbers() -> None:
    """The model's shares and halves are those of the kernel."""
    source = (SOURCES / "decode_fused.cu").read_text(encoding="utf-8")
    assert re.search(r"others = gridDim\.x - 1, share = blockIdx\.x \? 1 : 0x10000 - others", source)
    assert "return word >> 16;" in source
    assert MOST_BLOCKS == ARRIVALS - 1
