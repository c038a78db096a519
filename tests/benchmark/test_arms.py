"""What each arm launches: kernels, grids, threads and arguments, as the driver sees them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sm70_moe.benchmark.arms import arms
from sm70_moe.benchmark.readonly import EACH, shapes
from sm70_moe.benchmark.traffic import tile
from sm70_moe.kernels.native.driver import Config
from sm70_moe.kernels.native.steps import STEPS, Case
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.testing.driver import Launched
from sm70_moe.timings import W2, W13

FIRST = BankShape(experts=512, hidden=2560, intermediate=160)
OCTETS = BankLayout("octet32", Metadata.FOUR_BYTE, 32, True, True)


def launched(stage, stand, name: str, launch: str = "plain", part: str = "both", layer: int = 1) -> list[Launched]:
    """The launches of one layer of the first arm of that kind."""
    arm = next(a for a in arms(stand, []) if (a.name, a.launch, a.part) == (name, launch, part))
    ready = arm.ready(stand)
    stage.driver.launched.clear()
    ready.layer(layer)
    return list(stage.driver.launched)


def named(stage, one: Launched) -> dict[str, float]:
    return dict(zip(stage.kernels.names[one.kernel], one.arguments, strict=True))


def test_separator_and_floor(rehearse) -> None:
    """One block writes ids and weights; two empty kernels after it are the floor."""
    stage = rehearse()
    stand = stage.stand(stage.setup())
    (one,) = launched(stage, stand, "separator")
    assert one.config == Config((1, 1, 1), 32, 0, False, False)
    assert named(stage, one) == {
        "from_ids": stand.from_ids[1].data_ptr(),
        "from_weights": stand.from_weights[1].data_ptr(),
        "ids": stand.ids.data_ptr(),
        "weights": stand.weights.data_ptr(),
        "count": 8,
    }
    floor = launched(stage, stand, "floor")
    assert [(x.kernel, x.config.grid, x.config.threads) for x in floor] == [
        ("separator", (1, 1, 1), 32),
        ("nothing", (1, 1, 1), 32),
        ("nothing", (1, 1, 1), 32),
    ]


def test_every_arm_starts_with_the_same_separator(rehearse) -> None:
    """One plain launch, whatever comes after it."""
    stage = rehearse()
    stand = stage.stand(stage.setup(), tokens=1)
    for arm in arms(stand, []):
        ready = arm.ready(stand)
        stage.driver.launched.clear()
        ready.layer(0)
        first = stage.driver.launched[0]
        assert (first.kernel, first.config.dependent) == ("separator", False)
        assert sum(x.kernel == "separator" for x in stage.driver.launched) == 1


def test_roofline(rehearse) -> None:
    """W13: tiles x different experts. W2: tiles, with all experts in one go."""
    stage = rehearse()
    setup = stage.setup()
    stand = stage.stand(setup)
    distinct = len(stand.routing.distinct(1))
    separator, w13, w2 = launched(stage, stand, "roofline")
    assert named(stage, separator)["from_ids"] == stand.from_distinct[1].data_ptr()
    bank = setup.bank(1)
    assert (w13.kernel, w13.config) == ("roofline_w13", Config((16, distinct, 1), 32, 0, False, False))
    assert named(stage, w13) == {
        "words": bank.w13.planes["words"].data_ptr(),
        "groups": bank.w13.planes["metadata"].data_ptr(),
        "ids": stand.ids.data_ptr(),
        "out": stand.sink.data_ptr(),
        "tiles": 16,
        "tile_bytes": 1024,
        "group_bytes": 256,
    }
    assert (w2.kernel, w2.config) == ("roofline_w2_2", Config((32, 1, 1), 120, 0, False, False))
    assert named(stage, w2)["count"] == distinct
    assert named(stage, w2)["words"] == bank.w2.planes["words"].data_ptr()
    *_, last = launched(stage, stand, "roofline", "dependent")
    assert last.config.dependent
    assert [x.kernel for x in launched(stage, stand, "roofline", part="w13")] == ["separator", "roofline_w13"]
    assert [x.kernel for x in launched(stage, stand, "roofline", part="w2")][1].startswith("roofline_w2")


def test_ours(rehearse) -> None:
    """The launches that the route plans, on the bank of the layer; only the second kernel may overlap."""
    stage = rehearse()
    setup = stage.setup()
    stand = stage.stand(setup)
    for launch in ("plain", "dependent"):
        case = Case(setup.shape, setup.layout, setup.top_k, 2, "sm_90", launch == "dependent")
        planned = [(s.kernel, (*s.grid, 1), s.dependent) for s in STEPS["grouped"].steps(case)]
        _, w13, w2 = launched(stage, stand, "ours", launch, layer=3)
        assert [(x.kernel, x.config.grid, x.config.dependent) for x in (w13, w2)] == planned
        assert [x.config.dependent for x in (w13, w2)] == [launch == "dependent"] * 2
        assert named(stage, w13)["w13_words"] == setup.bank(3).w13.planes["words"].data_ptr()
        assert named(stage, w2)["out"] == stand.out.data_ptr()
    assert [x.kernel for x in launched(stage, stand, "ours", part="w13")] == ["separator", w13.kernel]
    _, alone = launched(stage, stand, "ours", part="w2", layer=2)
    assert (alone.kernel, alone.config.dependent) == (w2.kernel, False)
    assert named(stage, alone)["intermediate"] == stand.inner.data_ptr()
    assert named(stage, alone)["w2_words"] == setup.bank(2).w2.planes["words"].data_ptr()


def test_one_launch(rehearse) -> None:
    """One token in one cooperative launch."""
    stage = rehearse()
    stand = stage.stand(stage.setup(), tokens=1)
    _, one = launched(stage, stand, "fused")
    assert (one.kernel, one.config.cooperative) == ("fused_1", True)


WIDER = ("t256 s4", "t256 s8", "t256 s16", "t32 each")
"""Shapes for many experts, and the one with a block for each."""


@pytest.mark.parametrize(
    ("most", "labels", "kernels"),
    [
        (10, ["t128 s1", "t256 s1", "t256 s2", "t512 s1", "t512 s2", *WIDER], [8, 2, 1, 1, 1, 1, 1, 1, 0]),
        (40, ["t256 s1", "t256 s2", "t512 s1", "t512 s2", *WIDER], [8, 4, 4, 2, 2, 1, 1, 0]),
        (80, ["t256 s2", "t512 s1", "t512 s2", *WIDER], [8, 8, 4, 4, 2, 1, 0]),
        (160, ["t512 s2", *WIDER], [8, 8, 4, 2, 0]),
        (161, ["t256 s8", "t256 s16", "t32 each"], [8, 4, 0]),
    ],
)
def test_shapes_of_the_first_contract(most: int, labels: list[str], kernels: list[int]) -> None:
    """Those that hold so many experts at once, each with 160, 200 and 400 threads for W13."""
    found = shapes(OCTETS, FIRST, most)
    assert [s.label for s in found] == [f"{label} w{wide}" for label in labels for wide in (160, 200, 400)]
    assert [s.loads for s in found[::3]] == kernels


def test_wide_layers() -> None:
    """A tile of W2 that no block reads of several experts: a block for each tile of each expert does."""
    assert {(s.loads, s.label) for s in shapes(OCTETS, BankShape(8, 2560, 4096), 8) if s.wide == 160} == {
        (EACH, "t256 each w160"),
        (EACH, "t320 each w160"),
        (EACH, "t640 each w160"),
    }


def public_layers() -> set[tuple[int, int, int, int, int]]:
    """H, I of a rank, experts, top-k and group of every public model that ranks divide."""
    rows = list(csv.DictReader((Path(__file__).parents[1] / "data" / "models.csv").read_text().splitlines()))
    found = {(int(r["H"]), int(r["I"]) // int(r["tp"]), int(r["E"]), int(r["k"]), int(r["g"])) for r in rows}
    return {sizes for sizes in found if sizes[1] % 32 == 0 and sizes[0] % 32 == 0}


def test_the_roofline_runs_on_every_public_layer() -> None:
    """Some shape holds each of them at every number of tokens, and no thread has more loads than its kernel."""
    layers = public_layers()
    assert len(layers) > 40
    for hidden, inner, experts, top_k, group in layers:
        layout = BankLayout("octet32", Metadata.FOUR_BYTE, 32 if inner % group else group, True, True)
        sizes = BankShape(experts, hidden, inner)
        w13, w2 = tile(layout, sizes, W13), tile(layout, sizes, W2)
        for tokens in (1, 2, 4, 8):
            most = min(experts, tokens * top_k)
            for shape in (found := shapes(layout, sizes, most)):
                assert w13.loads <= 6 * shape.wide <= 6 * 1024
                if shape.loads == EACH:
                    assert w2.loads <= 6 * shape.threads <= 6 * 1024
                else:
                    assert shape.threads // w2.loads * shape.split * shape.loads >= most
            assert any(shape.loads == EACH for shape in found), (hidden, inner, tokens)
