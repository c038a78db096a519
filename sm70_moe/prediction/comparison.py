"""A measurement beside its prediction: how a prediction becomes evidence, or is refuted."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sm70_moe.decision import Plain
from sm70_moe.errors import SettingsError
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.prediction.hardware import Gpu, Range
from sm70_moe.prediction.layer import works_of
from sm70_moe.prediction.measurements import OURS, PLAIN, Measured, Run
from sm70_moe.prediction.parameters import Fitted
from sm70_moe.prediction.program import Program
from sm70_moe.prediction.spread import time_range


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
            **{name: getattr(row, name) for name in ("part", "metadata", "tokens", "routing", "distinct")},
            "measured": round(self.measured, 3),
            "predicted": {name: round(value, 3) for name, value in asdict(self.predicted).items()},
            "inside": self.inside,
            "ratio": round(self.ratio, 3),
        }


def compare(run: Run, program: Program, geometry: Geometry, gpu: Gpu, fitted: Fitted) -> tuple[Compared, ...]:
    """Every row of our kernels in a graph with plain launches. Raises SettingsError if there is none."""
    rows = [row for row in run.rows if (row.arm, row.launch) == (OURS, PLAIN)]
    if not rows:
        raise SettingsError(f"{run.source}: no rows of arm {OURS!r} with {PLAIN!r} launches to compare with")
    return tuple(
        Compared(
            row,
            row.microseconds - run.separator(row),
            time_range(works_of(program, geometry, gpu, row), gpu, fitted),
        )
        for row in rows
    )
