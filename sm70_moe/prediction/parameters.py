"""The model's free numbers: each means something, and each is fitted on an H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from sm70_moe.errors import SettingsError
from sm70_moe.files import read_json

FITTED = Path(__file__).with_name("h200.json")
"""What the fit wrote, with its residuals and where it came from."""

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Parameters:
    """`launch`: microseconds of one kernel of a graph beyond its work. `reached`: share of the nominal bandwidth.

    `efficiency`: share of the issue slots (or of the busiest port) that is used while a multiprocessor has
    work. `serial`: share of what could overlap (bytes with instructions, a round of blocks with the next) that
    does not. `latency`: factor on the published latencies. `hidden`: share of W2's launch and first touch that
    dependent launch hides, more than 1 where it hides some of its bytes too; no V100 has that.
    """

    launch: float
    reached: float
    efficiency: float
    serial: float
    latency: float
    hidden: float


NAMES = tuple(each.name for each in fields(Parameters))

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "launch": (0.2, 3.0),
        "reached": (0.5, 0.96),
        "efficiency": (0.15, 1.0),
        "serial": (0.0, 1.0),
        "latency": (0.3, 3.0),
        "hidden": (0.0, 2.0),
    }
)
"""What each number can be and still mean what it says. A memory bus loses 4 % to refresh and turns at least."""


LARGEST_ERROR = 10.0
"""Of model / measured - 1: beyond it the numbers describe nothing."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Parameters, and how well they describe the measurements.

    `residuals` are model / measured - 1 by row; `left_out` the same by number of tokens, where all rows with
    so many tokens but the floors were kept from the fit. `spread` is the root of the mean square of those.
    `checks` are errors of rows that no fit uses: our kernel in one launch.
    """

    parameters: Parameters
    gpu: str
    build: str
    code: str
    date: str
    source: str
    residuals: Mapping[str, float]
    left_out: Mapping[str, Mapping[str, float]]
    checks: Mapping[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """Relative error of a prediction for a number of tokens that the fit has not seen."""
        every = [error for rows in self.left_out.values() for error in rows.values()]
        return float((sum(e * e for e in every) / len(every)) ** 0.5)

    @property
    def worst(self) -> float:
        """The greatest of these errors, without its sign."""
        return max(abs(error) for rows in self.left_out.values() for error in rows.values())

    @property
    def bounded(self) -> tuple[str, ...]:
        """Numbers that the fit would have taken further than they can mean anything."""
        return tuple(name for name in NAMES if getattr(self.parameters, name) in BOUNDS[name])

    def record(self) -> dict[str, Any]:
        derived = {"spread": self.spread, "worst": self.worst, "bounded": list(self.bounded)}
        return {"schema": SCHEMA, **asdict(self), **derived}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Fitted:
        """The inverse of `record`. Raises ValueError for another shape, and for numbers that mean nothing."""
        if not isinstance(record, Mapping) or record.get("schema") != SCHEMA:
            raise ValueError(f"no record of schema {SCHEMA}")
        made = msgspec.convert(record, cls)
        made.check()
        return made

    def check(self) -> None:
        """Raise ValueError unless every number lies within its bounds, and errors are there and finite."""
        for name, (low, high) in BOUNDS.items():
            value = getattr(self.parameters, name)
            if not low <= value <= high:
                raise ValueError(f"{name} {value}, accepted are {low} to {high}")
        if not self.left_out or not all(self.left_out.values()):
            raise ValueError("left_out has no errors, accepted is at least one for each number of tokens")
        for errors in (self.residuals, self.checks, *self.left_out.values()):
            for name, error in errors.items():
                if not -1 <= error <= LARGEST_ERROR:
                    raise ValueError(f"error {error} of {name}, accepted are -1 to {LARGEST_ERROR:.0f}")


def load_fitted(path: Path = FITTED) -> Fitted:
    """Read a file that `sm70-moe predict --fit` wrote. Raises SettingsError that names it."""
    accepted = "what `sm70-moe predict --fit BENCH.json OUT` writes"
    record = read_json(path, accepted)
    try:
        return Fitted.of_record(record)
    except ValueError as error:
        raise SettingsError(f"{path}: {error!r}; accepted is {accepted}") from error
