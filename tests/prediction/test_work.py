"""What a call asks of a GPU."""

from __future__ import annotations

import re

import pytest

from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.build import SOURCES
from sm70_moe.kernels.machinecode.flow import Flow, Role, Stretch
from sm70_moe.kernels.machinecode.pipes import Pipe
from sm70_moe.prediction.hardware import GPUS, gpu_of
from sm70_moe.prediction.occupancy import resident_blocks
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.routing import SERVED, Routing
from sm70_moe.prediction.work import Image, per_block


@pytest.mark.parametrize(("tokens", "distinct"), [(1, 10.0), (2, 19.8), (4, 38.8), (8, 74.7)])
def test_distinct_experts_of_uniform_routing(tokens: int, distinct: float) -> None:
    """The table of PERF."""
    assert Routing.of("uniform", tokens, 10, 512).distinct == pytest.approx(distinct, abs=0.05)


@pytest.mark.parametrize(("tokens", "groups"), [(1, 10), (4, 10), (5, 20), (8, 20)])
def test_blocks_of_overlapping_routing(tokens: int, groups: int) -> None:
    """Ten experts, and a second block for each once more than four tokens share it."""
    assert Routing.of("overlapping", tokens, 10, 512) == Routing("overlapping", 10, groups)


@pytest.mark.parametrize(
    ("metadata", "w13", "w2"),
    [("4-byte", 512_000, 256_000), ("3-byte", 486_400, 243_200), ("2.5-byte", 473_600, 236_800)],
)
def test_bytes_of_an_expert(call, metadata: str, w13: int, w2: int) -> None:
    """The table of PERF."""
    made = call(1, metadata)
    assert (made.expert_bytes("w13"), made.expert_bytes("w2")) == (w13, w2)


def test_blocks_of_the_first_contract(volta: ReadBuild, call) -> None:
    """At one token 400 octets are five blocks for each multiprocessor of a V100, and all have work."""
    first, second = volta.works(call(1), "sm_70")
    assert (first.blocks, first.live, first.warps) == (400, 400, 5)
    assert (second.blocks, second.live) == (320, 320)


def test_blocks_with_work_at_eight_tokens(volta: ReadBuild, call) -> None:
    """One for each octet and distinct expert; the others leave."""
    first = volta.works(call(8), "sm_70")[0]
    assert first.blocks == 3200
    assert first.live == pytest.approx(40 * 74.7, rel=1e-3)


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "expected"),
    [
        ("v100-sxm2-16", 160, 64, 160, 6),  # 32 warps of 64 registers
        ("v100-sxm2-16", 1024, 64, 0, 1),
        ("v100-sxm2-16", 32, 32, 0, 32),  # the limit of blocks
        ("v100-sxm2-16", 288, 54, 16_000, 4),  # 36 warps of 56 registers
        ("v100-sxm2-16", 320, 64, 40_000, 2),  # shared memory
        ("h200", 160, 48, 2_084, 8),
    ],
)
def test_resident_blocks(gpu: str, threads: int, registers: int, shared: int, expected: int) -> None:
    """Registers, warps, blocks or shared memory, whatever ends first."""
    assert resident_blocks(GPUS[gpu], threads, registers, shared) == expected


def test_too_many_tokens(volta: ReadBuild, call) -> None:
    """Nine have no native kernels."""
    with pytest.raises(SettingsError, match=r"9.*1 to 8"):
        volta.works(call(9), "sm_70")


def test_architecture_that_was_not_built(frozen) -> None:
    """The message says what there is."""
    with pytest.raises(BackendError, match=r"sm_75.*sm_70, sm_90"):
        ReadBuild.open(frozen, "sm_75")


def test_no_build(tmp_path) -> None:
    """A prediction is read off machine code."""
    with pytest.raises(BackendError, match="no native build"):
        ReadBuild.open(tmp_path, "sm_70")


def test_unknown_gpu_and_routing() -> None:
    """What is accepted is listed."""
    with pytest.raises(SettingsError, match="v100-sxm2-16"):
        gpu_of("v200")
    with pytest.raises(SettingsError, match="overlapping"):
        Routing.of("random", 1, 10, 512)


def test_tokens_of_a_block_are_those_of_the_source() -> None:
    """`kServed` of w13.cuh: MOST up to four. Another number or another way of writing it fails here."""
    found = re.findall(r"int kServed = (MOST < (\d+) \? MOST : (\d+));", (SOURCES / "w13.cuh").read_text())
    assert [numbers for _, *numbers in found] == [[str(SERVED), str(SERVED)]]


def looping(*stretches: Stretch) -> Image:
    """A kernel of 3 warps."""
    return Image(Flow("made", stretches, {}, 0, 96), "sm_70", 32, 0, 96, (1, 1))


@pytest.mark.parametrize(
    ("role", "items", "times"),
    [
        (Role.ALL, {}, 3),
        (Role.ONE, {}, 1),
        (Role.WAITING, {}, 1),  # one thread looks, counted once
        (Role.OTHER, {}, 3),  # a loop without a name: once for each warp
        (Role.STAGING, {Role.STAGING: 320}, 10),
        (Role.STAGING, {Role.STAGING: 33}, 2),
        (Role.LAST, {Role.LAST: 16}, 1),
        (Role.LAST, {Role.LAST: 640}, 3),  # no loop: no warp comes twice
    ],
)
def test_how_often_a_stretch_runs(role: Role, items: dict[Role, float], times: int) -> None:
    """Warps that run it, each as often as its loop goes round."""
    image = looping(Stretch(role, False, {Pipe.FLOAT: 7}))
    assert per_block(image, items, 0)[Pipe.FLOAT] == 7 * times


def test_a_loop_of_products_goes_round_until_all_steps_are_done() -> None:
    """24 steps of 3 warps: 2 outside of the loop, 2 in it, so 3 rounds."""
    image = looping(Stretch(Role.ALL, False, {Pipe.TENSOR: 2}), Stretch(Role.PRODUCT, False, {Pipe.TENSOR: 2}))
    assert per_block(image, {}, 24)[Pipe.TENSOR] == 24
