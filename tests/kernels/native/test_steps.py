"""Steps: kernels, grids and the names of their arguments, for layers whose blocks take several octets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import SOURCES
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.native.launch import Step
from sm70_moe.kernels.native.steps import CALL, STEPS, Case, Route, bank_arguments, decode, numbers
from sm70_moe.layout import BankLayout, BankShape, Metadata

MANIFESTS = load_manifests(SOURCES)
LAYOUT = BankLayout("octet32", Metadata.THREE_BYTE, 64, True, True)
WIDE = Case(BankShape(128, 2048, 768), LAYOUT, 8, 2, "sm_90", dependent=True)
DENSE = Case(BankShape(8, 4096, 3584), LAYOUT, 2, 8, "sm_90", dependent=False)


def told(case: Case) -> list[tuple[str, tuple[int, ...]]]:
    return [(step.kernel, step.grid) for step in decode(case)]


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (WIDE, [("w13_many_8", (32, 16)), ("w2_many", (128, 2))]),  # 6 octets of 192 a block, 2 of 256
        (replace(WIDE, tokens=3), [("w13_8", (192, 24)), ("w2_many", (128, 3))]),
        (replace(WIDE, tokens=1), [("w13_1", (192, 8)), ("w2_1", (256, 1))]),
        (replace(WIDE, tokens=8), [("w13_8", (192, 64)), ("w2_8", (256, 2))]),
        (DENSE, [("w13_many_8", (112, 16)), ("w2_8", (512, 2))]),  # 8 octets of 896
        # the quad-pair step has no registers for several octets, and tiles have no octets of blocks
        (replace(WIDE, architecture="sm_70"), [("w13_2", (192, 16)), ("w2_1", (256, 2))]),
        (replace(WIDE, architecture="sm_75"), [("w13_2", (192, 16)), ("w2_1", (256, 2))]),
        (
            replace(WIDE, layout=replace(LAYOUT, order="tile32x8")),
            [("w13_2", (192, 16)), ("w2_1", (256, 2))],
        ),
    ],
)
def test_layers_that_come_in_waves(case: Case, steps: list[tuple[str, tuple[int, ...]]]) -> None:
    """Blocks that take several octets are fewer; written out."""
    assert told(case) == steps


def test_both_steps_say_the_banks_and_whether_they_may_overlap() -> None:
    """What chooses the version, W13's threads by K, and dependent launch as the case has it."""
    w13, w2 = decode(WIDE)
    assert (w13.source, w2.source) == ("decode_w13", "decode_w2")
    assert dict(w13.axes) == dict(w2.axes) == {"metadata": "3-byte", "order": "octet32"}
    assert (w13.threads, w2.threads) == (128, None)  # a warp for each 512 of 2048
    assert (w13.dependent, w2.dependent) == (True, True)
    assert [step.dependent for step in decode(DENSE)] == [False, False]


def test_sizes_are_given_by_the_kernels_names() -> None:
    """Written out: a kernel with other sizes than its grid computes something else."""
    expected = {"tokens": 2, "top_k": 8, "hidden": 2048, "inner": 768, "experts": 128, "group": 64}
    assert numbers(WIDE) == expected


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_argument_of_every_kernel_is_given(name: str) -> None:
    """By the call, the sizes, the banks or the step itself; `scratch` is the layer's own, or lent."""
    long = replace(WIDE, tokens=STEPS[name].most(WIDE.shape, WIDE.top_k))
    own = {argument for case in (WIDE, long) for step in STEPS[name].steps(case) for argument in step.values}
    given = {*CALL, *numbers(WIDE), *bank_arguments({}), "scratch", *own}
    for source in STEPS[name].sources:
        for kernel in MANIFESTS[source].kernels.values():
            assert {argument.name for argument in kernel.arguments} <= given


def test_planes_that_a_layout_lacks_are_no_address() -> None:
    """0 for each plane of both banks, and what is there by its name."""
    planes = bank_arguments({"w13_words": 16, "w2_zeros": 48})
    assert len(planes) == 8
    assert {name: at for name, at in planes.items() if at} == {"w13_words": 16, "w2_zeros": 48}


def test_a_route_is_made_of_what_is_declared() -> None:
    """Nothing is declared: no route."""
    made = Route.of("grouped", decode, scratch=7)
    assert (made.first, made.last, made.sources, made.scratch) == (2, 8, ("decode_w13", "decode_w2"), 7)
    with pytest.raises(BackendError, match="elsewhere"):
        Route.of("elsewhere", lambda case: (Step("a", "b", grid=(1,)),))
