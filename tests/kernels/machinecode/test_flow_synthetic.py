"""Rules by which code is cut into stretches, on instruction words that are made here."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode.branches import instructions
from sm70_moe.kernels.machinecode.elf import Cubin, Section
from sm70_moe.kernels.machinecode.flow import Role, flow
from sm70_moe.kernels.machinecode.pipes import Pipe
from sm70_moe.kernels.machinecode.tasks import tasks

ALWAYS = 7  # the predicate that is true
WIDE, NARROW = 6 << 9, 4 << 9  # of a load: 16 bytes, 4 bytes
BOUND = bytes([4, 5]) + struct.pack("<HIII", 12, 96, 1, 1)  # __launch_bounds__(96)


@dataclass(frozen=True)
class Word:
    """One instruction; `to` is where a branch leads, as an index, and `threads` what a barrier waits for."""

    opcode: int
    guarded: bool = False
    high: int = 0
    to: int | None = None
    threads: int = 0

    def bytes(self, place: int, new: bool) -> bytes:
        low = self.opcode | (0 if self.guarded else ALWAYS) << 12 | self.threads << 42
        if self.to is not None:
            distance = (self.to - place - 1) * 16
            units = distance // 4
            low |= (units & 0xFF) << 16 | (units >> 8 << 34) if new else distance << 32
        return struct.pack("<QQ", low & (1 << 64) - 1, self.high)


MOVE, ADD = Word(0x202), Word(0x221)
HMMA, LOAD, LOAD_WIDE = Word(0x236), Word(0x381, high=NARROW), Word(0x381, high=WIDE)
STORE, PUT, TAKE = Word(0x386), Word(0x388), Word(0x984)
BAR, VOTE, EXIT, PADDING = Word(0xB1D), Word(0x806), Word(0x94D), Word(0x918)
MAYBE_EXIT = Word(0x94D, guarded=True)


def to(place: int) -> Word:
    return Word(0x947, to=place)


def maybe_to(place: int) -> Word:
    return Word(0x947, guarded=True, to=place)


def cubin(words: Sequence[Word], architecture: str = "sm_70") -> Cubin:
    data = b"".join(word.bytes(place, architecture == "sm_90") for place, word in enumerate(words))
    sections = (Section(".text.made", data, len(data), 0, 0), Section(".nv.info.made", BOUND, len(BOUND), 0, 0))
    return Cubin(architecture, sections, ())


def cut(words: Sequence[Word], architecture: str = "sm_70") -> list[tuple[Role, bool, int]]:
    return [(s.role, s.entered, s.total) for s in flow(cubin(words, architecture), "made").stretches]


@pytest.mark.parametrize("architecture", ["sm_70", "sm_90"])
def test_words_are_read_back(architecture: str) -> None:
    """Branches forward and back in both encodings, predicates, widths and threads of a barrier; no padding."""
    words = [MOVE, maybe_to(3), to(0), LOAD_WIDE, Word(0xB1D, threads=160), MAYBE_EXIT, EXIT, to(7), PADDING]
    found = instructions(cubin(words, architecture), "made")
    assert [i.target for i in found] == [None, 3, 0, None, None, None, None]
    assert [i.guarded for i in found] == [False, True, False, False, False, True, False]
    assert [i.wide for i in found] == [False, False, False, True, False, False, False]
    assert [i.threads for i in found] == [0, 0, 0, 0, 160, 0, 0]


def test_straight_code_is_everybodys() -> None:
    """One stretch, by pipe, and the block's threads."""
    found = flow(cubin([MOVE, ADD, HMMA, LOAD, EXIT]), "made")
    (only,) = found.stretches
    assert (only.role, only.entered) == (Role.ALL, False)
    expected = {Pipe.INTEGER: 1, Pipe.FLOAT: 1, Pipe.TENSOR: 1, Pipe.MEMORY: 1, Pipe.CONTROL: 1}
    assert only.counts == expected
    assert (found.threads, found.barriers) == (96, 0)


def test_forward_branches_count_as_not_taken() -> None:
    """An upper bound: both sides of a divergence are run."""
    assert cut([MOVE, maybe_to(4), ADD, ADD, HMMA, EXIT]) == [(Role.ALL, False, 6)]


@pytest.mark.parametrize("architecture", ["sm_70", "sm_90"])
def test_detours_that_end_in_an_exit_are_not_taken(architecture: str) -> None:
    """A block with work passes over them; one without runs them and no more."""
    words = [MOVE, maybe_to(5), ADD, ADD, EXIT, MOVE, HMMA, EXIT]
    assert cut(words, architecture) == [(Role.ALL, False, 2), (Role.ALL, False, 3)]


def test_an_exit_under_a_condition_before_any_product_is_that_of_blocks_without_work() -> None:
    """What stands up to it is all that they run."""
    found = flow(cubin([MOVE, ADD, MAYBE_EXIT, MOVE, HMMA, EXIT]), "made")
    assert found.leaving == {Pipe.INTEGER: 1, Pipe.FLOAT: 1, Pipe.CONTROL: 1}
    assert [s.total for s in found.stretches] == [6]


def test_behind_the_last_barrier_and_a_condition_are_the_last_sums() -> None:
    """An exit under a condition before the barrier does not begin them."""
    words = [MAYBE_EXIT, HMMA, BAR, MOVE, MAYBE_EXIT, ADD, STORE, EXIT]
    assert cut(words) == [(Role.ALL, False, 5), (Role.LAST, False, 3)]
    assert cut([HMMA, MAYBE_EXIT, BAR, ADD, STORE, EXIT]) == [(Role.ALL, False, 6)]


def test_code_of_warps_that_have_parted() -> None:
    """It stands behind the last exit and is nobody's; that it leads back makes no loop."""
    assert cut([MOVE, to(4), HMMA, EXIT, VOTE, to(2)]) == [(Role.ALL, False, 4)]


def test_one_warp_votes() -> None:
    """What a branch passes over and what asks all lanes is decided by warps; products are everybody's all the same."""
    assert cut([maybe_to(3), VOTE, ADD, HMMA, EXIT]) == [
        (Role.ALL, False, 1),
        (Role.ONE, False, 2),
        (Role.ALL, False, 2),
    ]
    assert cut([maybe_to(3), VOTE, HMMA, HMMA, EXIT]) == [(Role.ALL, False, 5)]


@pytest.mark.parametrize(
    ("body", "role"),
    [
        ((LOAD_WIDE, HMMA), Role.PRODUCT),
        ((TAKE, ADD, STORE), Role.STORING),
        ((LOAD_WIDE, PUT), Role.STAGING),
        ((Word(0xFAE), ADD), Role.STAGING),  # a copy from global to shared memory
        ((LOAD, PUT), Role.SCALARS),
        ((TAKE, ADD, PUT), Role.SUMMING),
        ((LOAD, ADD), Role.WAITING),
        ((ADD, MOVE), Role.OTHER),
    ],
)
@pytest.mark.parametrize("architecture", ["sm_70", "sm_90"])
def test_what_a_loop_does_says_what_it_is(body: tuple[Word, ...], role: Role, architecture: str) -> None:
    """A branch back makes a loop; with a branch over it, what stands in front is run by those who enter."""
    size = len(body)
    assert cut([MOVE, *body, maybe_to(1), EXIT], architecture) == [
        (Role.ALL, False, 1),
        (role, False, size + 1),
        (Role.ALL, False, 1),
    ]
    assert cut([maybe_to(size + 3), MOVE, *body, maybe_to(2), EXIT], architecture) == [
        (Role.ALL, False, 1),
        (role, True, 1),
        (role, False, size + 1),
        (Role.ALL, False, 1),
    ]


def test_a_loop_within_a_loop_counts_once_for_each_round() -> None:
    """The outer one says what they are; instructions of the inner stand in it once."""
    inner = [TAKE, ADD, PUT, maybe_to(2)]
    assert cut([MOVE, LOAD_WIDE, *inner, HMMA, maybe_to(1), EXIT]) == [
        (Role.ALL, False, 1),
        (Role.PRODUCT, False, 7),
        (Role.ALL, False, 1),
    ]


def test_two_ways_round_a_loop_are_one_loop() -> None:
    """A warp that has parted joins in the middle: its way back overlaps the loop and does not lie in it."""
    assert cut([MOVE, LOAD, MOVE, VOTE, maybe_to(1), to(2), EXIT]) == [
        (Role.ALL, False, 1),
        (Role.WAITING, False, 5),
        (Role.ALL, False, 1),
    ]


def test_loops_side_by_side() -> None:
    """Each has its own role."""
    words = [LOAD, PUT, maybe_to(0), BAR, TAKE, STORE, maybe_to(4), EXIT]
    assert [role for role, *_ in cut(words)] == [Role.SCALARS, Role.ALL, Role.STORING, Role.ALL]


def product(first: int, threads: int, behind: int) -> list[Word]:
    """A loop of tasks at `first`: load, barrier, product, sums of some threads, barrier; 9 instructions."""
    wait = Word(0xB1D, threads=threads)
    return [LOAD_WIDE, wait, HMMA, wait, maybe_to(first + behind), ADD, STORE, wait, maybe_to(first)]


def two_products() -> list[Word]:
    return [MOVE, MOVE, *product(2, 32, 7), MOVE, *product(12, 64, 7), EXIT]


@pytest.mark.parametrize("architecture", ["sm_70", "sm_90"])
def test_loops_of_tasks(architecture: str) -> None:
    """Each is cut as a kernel of its own, for the threads of its barriers; what stands outside runs once."""
    found = tasks(cubin(two_products(), architecture), "made")
    assert [sum(counts.values()) for counts in found.once] == [2, 1, 1]
    assert [each.threads for each in found.each] == [32, 64]
    for each in found.each:
        cuts = [(s.role, s.entered, s.total) for s in each.stretches]
        assert cuts == [(Role.ALL, False, 5), (Role.LAST, False, 2), (Role.ALL, False, 2)]
        assert each.barriers == 3
    assert found.threads == 96


def test_a_task_that_ends_early() -> None:
    """A detour to the end of the task, which one with work does not take."""
    wait = Word(0xB1D, threads=32)
    body = [maybe_to(4), STORE, to(10), MOVE, LOAD_WIDE, wait, HMMA, wait, ADD, STORE, wait, maybe_to(0), EXIT]
    (only,) = tasks(cubin(body), "made").each
    assert [(s.role, s.total) for s in only.stretches] == [(Role.ALL, 1), (Role.ALL, 6), (Role.ALL, 2)]


def test_every_instruction_of_tasks_is_counted_once() -> None:
    """Stretches and what stands outside make the whole kernel."""
    found = tasks(cubin(two_products()), "made")
    inside = sum(s.total for each in found.each for s in each.stretches)
    assert inside + sum(sum(counts.values()) for counts in found.once) == len(two_products())


def test_barriers_of_the_whole_block() -> None:
    """They say nothing of threads: the bound does."""
    (only,) = tasks(cubin([*product(0, 0, 7), EXIT]), "made").each
    assert only.threads == 96


def test_a_loop_of_products_alone_is_no_loop_of_tasks() -> None:
    """Its results stand behind it."""
    words = [LOAD_WIDE, BAR, HMMA, maybe_to(0), BAR, STORE, EXIT]
    assert tasks(cubin(words), "made").each == ()


def test_the_way_back_of_parted_warps_is_no_loop_of_tasks() -> None:
    """It stands behind the exit of a block with work."""
    words = [LOAD_WIDE, BAR, HMMA, STORE, EXIT, VOTE, to(0)]
    assert tasks(cubin(words), "made").each == ()


def test_kernels_that_are_not_there() -> None:
    """Named, by both ways of cutting."""
    for way in (flow, tasks):
        with pytest.raises(BackendError, match="absent"):
            way(cubin([EXIT]), "absent")
