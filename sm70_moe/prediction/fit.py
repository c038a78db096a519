"""Finding the free numbers: least squares of relative errors, by Gauss-Newton steps within bounds.

Deterministic: the same measurements and machine code give the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sm70_moe.errors import SettingsError
from sm70_moe.files import check_target, write
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.prediction.fused import fused_parts
from sm70_moe.prediction.hardware import GPUS, Gpu
from sm70_moe.prediction.layer import call_of, checked, judged, microseconds, works_of
from sm70_moe.prediction.measurements import Measured, Run
from sm70_moe.prediction.model import Setting
from sm70_moe.prediction.parameters import BOUNDS, NAMES, Fitted, Parameters
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.work import Work
from sm70_moe.timings import FLOOR

Vector = NDArray[np.float64]

START = Parameters(launch=0.8, reached=0.85, efficiency=0.5, serial=0.3, latency=1.0, hidden=0.5)
STEPS = 60
DAMPING = 1e-3
SETTLED = 1e-9
"""A step that moves no number by more ends the search: they are rounded to six digits."""
LEAST_ROWS = 2 * len(NAMES)
"""Fewer rows would leave the numbers to chance."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured row, the kernels that it timed, and the separating kernel's microseconds."""

    row: Measured
    works: tuple[Work, ...]
    separator: float

    def error(self, gpu: Gpu, parameters: Parameters) -> float:
        """Model / measured - 1, both with the separating kernel."""
        return (self.separator + microseconds(self.row, self.works, gpu, parameters)) / self.row.microseconds - 1


def points_of(run: Run, build: ReadBuild, geometry: Geometry, gpu: Gpu) -> tuple[Point, ...]:
    """The rows of a run that a fit uses. Raises SettingsError if they are too few, or of another GPU or geometry."""
    if gpu_named(run.gpu) is not gpu:
        raise SettingsError(f"{run.source}: measured on {run.gpu!r}; a fit takes measurements of {gpu.title}")
    run.check_geometry(geometry)
    rows = [row for row in run.rows if judged(row)]
    if len(rows) < LEAST_ROWS:
        raise SettingsError(f"{run.source}: {len(rows)} rows can be used; a fit takes at least {LEAST_ROWS}")
    return tuple(Point(row, works_of(build, geometry, gpu, row), run.separator(row)) for row in rows)


def check_build(run: Run, build: ReadBuild) -> None:
    """Raise SettingsError if other code was timed than is read, unless the file says where its numbers come from."""
    if run.build != build.cubins.id and not run.documented:
        raise SettingsError(
            f"{run.source}: timed with build {run.build or 'none'}, and {build.cubins.folder} has build "
            f"{build.cubins.id}; accepted are times of the code that is read, or a file whose `source` says where "
            "its numbers come from"
        )


def gpu_named(name: str) -> Gpu | None:
    """The GPU that a driver calls by this name, such as "NVIDIA H200" or "Tesla V100-SXM2-16GB"."""
    words = name.lower().replace("-", " ").replace("gb", "").split()
    return next((gpu for gpu in GPUS.values() if all(word in words for word in gpu.name.split("-"))), None)


def solve(points: Sequence[Point], gpu: Gpu) -> Parameters:
    """The parameters with the least sum of squared relative errors."""

    def errors(values: Vector) -> Vector:
        parameters = Parameters(*values.tolist())
        return np.array([point.error(gpu, parameters) for point in points])

    low, high = (np.array([BOUNDS[name][side] for name in NAMES]) for side in (0, 1))
    start = np.array([getattr(START, name) for name in NAMES])
    return Parameters(*(round(value, 6) for value in descend(errors, start, low, high).tolist()))


def descend(errors: Callable[[Vector], Vector], start: Vector, low: Vector, high: Vector) -> Vector:
    """Damped Gauss-Newton steps, cut at the bounds; a step that makes it worse is made shorter."""
    values, now, damping = start, errors(start), DAMPING
    slope = _slopes(errors, values, now, high)
    for _ in range(STEPS):
        square = slope.T @ slope
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), slope.T @ now)
        tried = np.clip(values - step, low, high)
        if np.abs(tried - values).max() < SETTLED:
            break
        found = errors(tried)
        if found @ found < now @ now:
            values, now, damping = tried, found, max(damping / 3, 1e-9)
            slope = _slopes(errors, values, now, high)
        else:
            damping *= 4
    return values


def _slopes(errors: Callable[[Vector], Vector], values: Vector, now: Vector, high: Vector) -> Vector:
    return np.stack([_slope(errors, values, now, i, high) for i in range(len(values))], axis=1)


def _slope(errors: Callable[[Vector], Vector], values: Vector, now: Vector, place: int, high: Vector) -> Vector:
    step = 1e-5 if values[place] + 1e-5 <= high[place] else -1e-5
    moved = values.copy()
    moved[place] += step
    return (errors(moved) - now) / step


def fit(run: Run, build: ReadBuild, geometry: Geometry, gpu: Gpu, date: str) -> Fitted:
    """All rows at once, and once more without each number of tokens in turn.

    Floors stay in: two empty kernels have no tokens. Raises SettingsError for times of other code or another GPU,
    for too few rows, and where no numbers describe them.
    """
    check_build(run, build)
    points = points_of(run, build, geometry, gpu)
    parameters = solve(points, gpu)
    left_out = {}
    for tokens in sorted({point.row.tokens for point in points if point.row.arm != FLOOR}):
        left = [point for point in points if point.row.tokens == tokens and point.row.arm != FLOOR]
        others = [point for point in points if point not in left]
        if len(others) >= LEAST_ROWS:
            left_out[str(tokens)] = errors_of(left, gpu, solve(others, gpu))
    if not left_out:
        raise SettingsError(f"{run.source}: rows of one number of tokens only; a fit takes at least two")
    made = Fitted(
        parameters=parameters,
        gpu=run.gpu,
        build=run.build,
        code=build.cubins.id,
        date=date,
        source=run.source,
        residuals=errors_of(points, gpu, parameters),
        left_out=left_out,
    )
    return sound(made)


def sound(fitted: Fitted) -> Fitted:
    """The same numbers. Raises SettingsError for those that nobody could load."""
    try:
        fitted.check()
    except ValueError as error:
        raise SettingsError(f"{fitted.source}: no fit: {error}") from error
    return fitted


def errors_of(points: Sequence[Point], gpu: Gpu, parameters: Parameters) -> dict[str, float]:
    return {point.row.name: round(point.error(gpu, parameters), 4) for point in points}


def with_checks(fitted: Fitted, run: Run, build: ReadBuild, geometry: Geometry, gpu: Gpu) -> Fitted:
    """The same numbers beside rows that they were not fitted to: our kernel in one launch.

    Raises BackendError where the build does not have it for one of these rows, SettingsError if it is far from one.
    """
    setting = Setting.likely(gpu, fitted.parameters)
    errors = {}
    for row in filter(checked, run.rows):
        time = fused_parts(build.fused(call_of(geometry, row), gpu), setting).total
        errors[row.name] = round((run.separator(row) + time) / row.microseconds - 1, 4)
    return sound(replace(fitted, checks=errors))


def write_fitted(fitted: Fitted, path: Path) -> None:
    """As JSON; the file is there as a whole or not at all. Raises SettingsError where it cannot be written."""
    check_target("--fit", path)
    write("--fit", path, (json.dumps(fitted.record(), indent=1) + "\n").encode())
