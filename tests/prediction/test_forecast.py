"""Predicted times, their range, and a measurement beside them."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from sm70_moe.errors import SettingsError
from sm70_moe.prediction.comparison import compare
from sm70_moe.prediction.forecast import PERFECT_GAIN, PREDICTED, forecast
from sm70_moe.prediction.hardware import GPUS
from sm70_moe.prediction.measurements import Measured, Run
from sm70_moe.prediction.parameters import Fitted
from sm70_moe.prediction.readbuild import ReadBuild

V100 = GPUS["v100-sxm2-16"]
REACHED = {1: 9.7, 4: 38, 8: 72}  # microseconds for the bytes at 794 GB/s


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("gpu", ["v100-sxm2-16", "v100-pcie-32"])
def test_range_lies_above_the_floor(volta: ReadBuild, fitted: Fitted, call, tokens: int, gpu: str) -> None:
    """The floor, then low, likely and high."""
    made = forecast(volta, call(tokens), GPUS[gpu], fitted)
    times = [made.nominal, made.time.low, made.time.likely, made.time.high]
    assert times == sorted(times)
    assert made.nominal < made.reached < made.time.likely
    assert made.label == PREDICTED


@pytest.mark.parametrize("tokens", sorted(REACHED))
def test_anchors(volta: ReadBuild, fitted: Fitted, call, tokens: int) -> None:
    """Between the floor at what a real kernel reached and two and a half times that."""
    made = forecast(volta, call(tokens), V100, fitted)
    assert REACHED[tokens] < made.time.likely < 2.5 * REACHED[tokens]


def test_more_tokens_take_longer(volta: ReadBuild, fitted: Fitted, call) -> None:
    """They choose more experts."""
    times = [forecast(volta, call(tokens), V100, fitted).time.likely for tokens in range(1, 9)]
    assert times == sorted(times)


def test_less_metadata_is_no_slower_in_bytes(volta: ReadBuild, fitted: Fitted, call) -> None:
    """Floors shrink with the bytes; what the kernels make of it is another thing."""
    floors = [forecast(volta, call(4, kind), V100, fitted).nominal for kind in ("4-byte", "3-byte", "2.5-byte")]
    assert floors == sorted(floors, reverse=True)


def test_pcie_is_no_faster(volta: ReadBuild, fitted: Fitted, call) -> None:
    """The same chip with a lower clock."""
    sxm2, pcie = (forecast(volta, call(1), GPUS[n], fitted).time for n in ("v100-sxm2-16", "v100-pcie-16"))
    assert sxm2.likely <= pcie.likely


def test_parts_make_the_total(volta: ReadBuild, fitted: Fitted, call) -> None:
    """The likely time is that of the kernels' parts, one after the other."""
    made = forecast(volta, call(4), V100, fitted)
    assert sum(parts.total for parts in made.parts) == pytest.approx(made.time.likely)
    for parts, gains in zip(made.parts, made.gains, strict=True):
        assert all(0 <= saved < parts.total for saved in asdict(gains).values())
        assert gains.launch == pytest.approx(parts.launch)


def test_worse_fits_have_wider_ranges(volta: ReadBuild, fitted: Fitted, call) -> None:
    """The model's own error is part of the range."""
    worse = replace(fitted, left_out={"1": {"row": 0.4}})
    known, unsure = (forecast(volta, call(4), V100, each).time for each in (fitted, worse))
    assert unsure.high - unsure.low > known.high - known.low
    assert unsure.low >= forecast(volta, call(4), V100, worse).nominal


def test_whole_model_gains_little() -> None:
    """Experts are 7 % of a step: less than 8 % more tokens a second if they took no time."""
    assert 0.07 < PERFECT_GAIN < 0.08


def measured(microseconds: float, launch: str = "plain") -> Run:
    row = Measured("ours", launch, "both", "4-byte", 4, "uniform", 38.8, microseconds)
    apart = Measured("separator", "plain", "both", "4-byte", 4, "uniform", 38.8, 2.0)
    return Run("Tesla V100-SXM2-16GB", "b", "p", "test", "", (row, apart))


def test_comparison(volta: ReadBuild, fitted: Fitted, call) -> None:
    """The separating kernel is taken off; a time inside of the range is called so, one outside too."""
    likely = forecast(volta, call(4), V100, fitted).time.likely
    near, far = (
        compare(measured(time), volta, call(4).geometry, V100, fitted).rows[0] for time in (likely + 2.0, likely * 3)
    )
    assert near.measured == pytest.approx(likely)
    assert near.inside
    assert near.ratio == pytest.approx(1.0, abs=0.01)
    assert not far.inside


def test_nothing_to_compare(volta: ReadBuild, fitted: Fitted, call) -> None:
    """A V100 has no dependent launch, so such rows are not judged."""
    with pytest.raises(SettingsError, match="plain"):
        compare(measured(10.0, "dependent"), volta, call(4).geometry, V100, fitted)
