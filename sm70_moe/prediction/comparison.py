"""A measurement beside its prediction: how a prediction becomes evidence, or is given up."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.prediction.fused import fused_parts
from sm70_moe.prediction.hardware import Gpu, Range
from sm70_moe.prediction.layer import call_of, checked, works_of
from sm70_moe.prediction.measurements import Measured, Run
from sm70_moe.prediction.parameters import Fitted
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.spread import SIDES, range_of, time_range
from sm70_moe.timings import OURS, PLAIN

EXPECTED = 1 - (SIDES[1] - SIDES[0]) / 100
"""Share of rows that lie outside of their ranges if the model is right: ranges end at percentiles."""

MOST_OUTSIDE = 0.2
"""A larger share counts against the model. Twice what is expected, since the rows of a run are not independent: they
share a clock, a memory and what the model does not know, so they miss together."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured row without its separating kernel, and the predicted range; microseconds a layer."""

    row: Measured
    measured: float
    predicted: Range

    @property
    def inside(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high

    @property
    def ratio(self) -> float:
        """Measured over the likely value."""
        return self.measured / self.predicted.likely

    def record(self) -> dict[str, Plain]:
        row = self.row
        return {
            **{name: getattr(row, name) for name in ("arm", "part", "metadata", "tokens", "routing", "distinct")},
            "measured": round(self.measured, 3),
            "predicted": {name: round(value, 3) for name, value in asdict(self.predicted).items()},
            "inside": self.inside,
            "ratio": round(self.ratio, 3),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows beside their predictions, and why others have none."""

    rows: tuple[Compared, ...]
    missing: tuple[str, ...]

    @property
    def outside(self) -> tuple[Compared, ...]:
        return tuple(row for row in self.rows if not row.inside)

    @property
    def against(self) -> bool:
        """Do more rows lie outside than chance explains?"""
        return len(self.outside) / len(self.rows) > MOST_OUTSIDE


def compare(run: Run, build: ReadBuild, geometry: Geometry, gpu: Gpu, fitted: Fitted) -> Comparison:
    """Every row of our kernels in a graph with plain launches, or with one.

    Raises SettingsError if there is none, and for a run that timed another geometry. A row whose kernels the build
    does not have is missing; BackendError if all are.
    """
    run.check_geometry(geometry)
    rows = [row for row in run.rows if (row.arm, row.launch) == (OURS, PLAIN) or checked(row)]
    if not rows:
        raise SettingsError(f"{run.source}: no rows of arm {OURS!r} with {PLAIN!r} launches to compare with")
    found, missing = [], []
    for row in rows:
        try:
            predicted = predict(row, build, geometry, gpu, fitted)
        except BackendError as error:
            missing.append(f"{row.name}: {error}")
        else:
            found.append(Compared(row, row.microseconds - run.separator(row), predicted))
    if not found:
        raise BackendError("; ".join(missing))
    return Comparison(tuple(found), tuple(missing))


def predict(row: Measured, build: ReadBuild, geometry: Geometry, gpu: Gpu, fitted: Fitted) -> Range:
    """Microseconds of what a row timed. Raises BackendError where the build does not have it."""
    if not checked(row):
        return time_range(works_of(build, geometry, gpu, row), gpu, fitted)
    fused = build.fused(call_of(geometry, row), gpu)
    return range_of(lambda setting: fused_parts(fused, setting).total, fused.works, gpu, fitted)
