"""Counts read from machine code, against what a disassembler and a GPU's own counters say."""

from __future__ import annotations

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode.branches import distance, instructions
from sm70_moe.kernels.machinecode.elf import Cubin
from sm70_moe.kernels.machinecode.flow import Role, flow
from sm70_moe.kernels.machinecode.pipes import Pipe, pipe_of
from sm70_moe.kernels.machinecode.tasks import tasks
from sm70_moe.prediction.readbuild import ReadBuild


def cubin(build: ReadBuild, source: str, architecture: str) -> Cubin:
    image = next(i for i in build.cubins.images if (i.version.source, i.version.architecture) == (source, architecture))
    return Cubin.parse(build.cubins.read(image))


@pytest.mark.parametrize(
    ("word", "new", "expected"),
    [
        (0x0000008000008947, False, 0x80),
        (0xFFFFFF3000000947, False, -0xD0),
        (0x0000000000208947, True, 0x80),
        (0x00000004007C8947, True, 0x5F0),
        (0xFFFFFFFC00CC0947, True, -0xD0),
        (0xFFFFFFF400301947, True, -0xB40),
    ],
)
def test_distance_of_a_branch(word: int, new: bool, expected: int) -> None:
    """Words of real kernels, with the distances that NVIDIA's disassembler shows."""
    assert distance(word, new) == expected


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        (0x236, Pipe.TENSOR),
        (0x23C, Pipe.TENSOR),
        (0x836, Pipe.INTEGER),  # the same operation number, an addition
        (0x231, Pipe.HALF),
        (0x431, Pipe.HALF),
        (0x824, Pipe.MULTIPLY),
        (0x812, Pipe.INTEGER),
        (0x381, Pipe.MEMORY),
        (0x981, Pipe.MEMORY),
        (0x308, Pipe.SPECIAL),
        (0xAB9, Pipe.UNIFORM),
        (0x947, Pipe.CONTROL),
    ],
)
def test_pipes(opcode: int, pipe: Pipe) -> None:
    """HMMA, HFMA2, IMAD, LOP3, LDG, MUFU, ULDC and BRA."""
    assert pipe_of(opcode) is pipe


def test_instructions_per_scheduler_at_one_token(hopper: ReadBuild, call) -> None:
    """w13_1 on an H200: a counter said 1,378 issued a scheduler (of an earlier version); within 8 %."""
    work = hopper.works(call(1), "sm_90")[0]
    assert work.kernel == "w13_1"
    assert work.slots / (132 * 4) == pytest.approx(1378, rel=0.08)


def test_instructions_at_eight_tokens(hopper: ReadBuild, call) -> None:
    """w13_8 on an H200: 6.2 million in all (an earlier version); within 8 %."""
    work = hopper.works(call(8), "sm_90")[0]
    assert work.kernel == "w13_8"
    assert work.slots == pytest.approx(6.2e6, rel=0.08)


def test_instructions_per_warp(hopper: ReadBuild, call) -> None:
    """About 390 of W13."""
    assert hopper.works(call(1), "sm_90")[0].per_warp == pytest.approx(390, rel=0.05)


@pytest.mark.parametrize(("tokens", "kernel"), [(1, "w2_1"), (2, "w2_1"), (4, "w2_4"), (8, "w2_8")])
@pytest.mark.parametrize(("architecture", "each"), [("sm_70", 8), ("sm_90", 1)])
def test_tensor_steps_are_those_of_the_product(volta, hopper, call, tokens, kernel, architecture, each) -> None:
    """Whether its loop is rolled or not, W2 runs a step for each unit of each slot; up to 44 % more have nothing to do.

    (sm_70 at one token: 3 x 4 places for 10 slots, 3 x 2 for 5 runs.)
    """
    work = (volta if architecture == "sm_70" else hopper).works(call(tokens), architecture)[1]
    assert work.kernel == kernel
    needed = tokens * 10 * 5 * 320 * each
    assert needed <= work.instructions[Pipe.TENSOR] <= 1.44 * needed


def test_roles_of_a_volta_kernel(volta: ReadBuild) -> None:
    """w2_1 has a loop for ids and router weights, one for activations, one for sums and one for results."""
    found = flow(cubin(volta, "decode_w2", "sm_70"), "w2_1")
    loops = [s.role for s in found.stretches if not s.entered and s.role not in (Role.ALL, Role.LAST)]
    assert loops == [Role.SCALARS, Role.STAGING, Role.SUMMING, Role.STORING]
    assert (found.threads, found.barriers) == (288, 3)


def test_one_warp_looks_for_tokens_on_an_h200(hopper: ReadBuild, volta: ReadBuild) -> None:
    """In w13_8 one warp scans the ids for its block; before sm_90 every warp does."""
    assert flow(cubin(hopper, "decode_w13", "sm_90"), "w13_8").counts(Role.ONE).total() > 50
    assert flow(cubin(volta, "decode_w13", "sm_70"), "w13_8").counts(Role.ONE).total() == 0


def test_blocks_without_work_leave_early(volta: ReadBuild) -> None:
    """w13_8 has such blocks, and they run a small part of it; with one token there are none."""
    found = flow(cubin(volta, "decode_w13", "sm_70"), "w13_8")
    assert 0 < sum(found.leaving.values()) < found.counts(Role.ALL).total() / 3
    assert sum(flow(cubin(volta, "decode_w13", "sm_70"), "w13_1").leaving.values()) == 0


@pytest.mark.parametrize(
    ("architecture", "threads", "bound", "loops"),
    [
        ("sm_70", [160, 192], 192, [Role.SCALARS, Role.WAITING, Role.STAGING, Role.SUMMING, Role.STORING]),
        ("sm_90", [160, 224], 224, [Role.SCALARS, Role.WAITING, Role.SUMMING, Role.STORING]),
    ],
)
def test_tasks_of_one_launch(volta_fused, hopper_fused, architecture, threads, bound, loops) -> None:
    """fused_1 has a loop of W13's tasks and one of W2's; in these the loops of the two kernels, and one that waits."""
    build = volta_fused if architecture == "sm_70" else hopper_fused
    found = tasks(cubin(build, "decode_fused", architecture), "fused_1")
    assert [each.threads for each in found.each] == threads
    assert found.threads == bound
    first, second = (
        [s.role for s in each.stretches if not s.entered and s.role not in (Role.ALL, Role.LAST)] for each in found.each
    )
    assert (first, second) == ([], loops)
    assert [each.barriers for each in found.each] == [3, 5]


def test_every_instruction_of_one_launch_is_looked_at(volta_fused: ReadBuild) -> None:
    """What is not counted is W13's detour of slots without an expert: a store and a few around it."""
    code = cubin(volta_fused, "decode_fused", "sm_70")
    found = tasks(code, "fused_1")
    counted = sum(s.total for each in found.each for s in each.stretches)
    counted += sum(sum(counts.values()) for counts in found.once)
    assert 0 <= len(instructions(code, "fused_1")) - counted < 20


def test_kernels_of_two_launches_have_no_tasks(volta: ReadBuild, hopper: ReadBuild) -> None:
    """Their loops hold products, and the results stand behind them."""
    for build, architecture in ((volta, "sm_70"), (hopper, "sm_90")):
        for source, kernel in (("decode_w13", "w13_8"), ("decode_w2", "w2_1"), ("decode_w2", "w2_8")):
            assert tasks(cubin(build, source, architecture), kernel).each == ()


def test_unknown_kernel(volta: ReadBuild) -> None:
    """It is named, and so are those that there are."""
    with pytest.raises(BackendError, match=r"w9.*w13_1, w13_8"):
        instructions(cubin(volta, "decode_w13", "sm_70"), "w9")


def test_architectures_whose_branches_are_not_known(volta: ReadBuild) -> None:
    """sm_100 and later are refused rather than read wrongly."""
    own = cubin(volta, "decode_w13", "sm_70")
    with pytest.raises(BackendError, match="sm_100"):
        instructions(Cubin("sm_100", own.sections, own.symbols), "w13_1")
