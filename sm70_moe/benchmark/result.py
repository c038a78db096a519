"""What a run of the benchmark found, as values and as JSON; needs no torch.

`microseconds` are per layer, with the separating kernel in front of it included. Nothing here is a
prediction: a row exists only where something was timed, and `Skipped` says what was not, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from sm70_moe.decision import Plain
from sm70_moe.errors import SettingsError
from sm70_moe.files import read_json
from sm70_moe.timings import BOTH, EAGER, FLOOR, PLAIN, RESULT, ROOFLINE, SCHEMA, UNJUDGED, WRONG


@dataclass(frozen=True, slots=True)
class Key:
    """Rows with equal keys read the same weights for the same tokens."""

    metadata: str
    tokens: int
    routing: str


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at one number of tokens.

    `distinct` is the mean number of different experts a layer; `bytes` is what a layer reads of the
    banks, 0 for arms that read nothing. `microseconds` is the median of `samples`, `spread` the
    largest minus the smallest. `shape` names a launch shape where an arm has several. `layers` are in a
    graph, or in an eager pass. `verdict` is `RIGHT`, `UNJUDGED`, or begins with `WRONG`.
    """

    arm: str
    launch: str
    part: str
    metadata: str
    tokens: int
    routing: str
    distinct: float
    bytes: int
    microseconds: float
    spread: float
    samples: tuple[float, ...]
    shape: str | None = None
    layers: int = 0
    verdict: str = UNJUDGED

    @classmethod
    def of(cls, samples: Iterable[float], **values: Any) -> Row:
        """A row from its samples, microseconds a layer."""
        found = tuple(samples)
        return cls(microseconds=median(found), spread=max(found) - min(found), samples=found, **values)

    @property
    def key(self) -> Key:
        return Key(self.metadata, self.tokens, self.routing)

    @property
    def gigabytes_per_second(self) -> float | None:
        """Bytes of the banks over the whole time, the separating kernel's included; None where nothing is read."""
        return self.bytes / self.microseconds / 1e3 if self.bytes else None

    @property
    def wrong(self) -> bool:
        return self.verdict.startswith(WRONG)


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was not timed, and why. A field is None where the reason holds for all of its values."""

    arm: str
    reason: str
    launch: str | None = None
    part: str | None = None
    metadata: str | None = None
    tokens: int | None = None
    routing: str | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """Microseconds of Python and driver for one eager call of a layer; the least of `samples`."""

    tokens: int
    metadata: str
    route: str
    microseconds: float
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    `gpu` are facts of the device, `protocol` how it was measured, `geometry` the sizes of a rank's
    layer. `build` is None without a native build.
    """

    gpu: Mapping[str, Plain]
    build: str | None
    policy: str
    policy_digest: str
    geometry: Mapping[str, int]
    protocol: Mapping[str, Plain]
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = ()
    host: tuple[Host, ...] = ()
    extra: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Something was timed, and nothing that was judged came out wrong."""
        return bool(self.rows) and not any(row.wrong for row in self.rows)

    @property
    def floor(self) -> float | None:
        """Median over all floor rows, microseconds a layer; None where there are none."""
        found = [row.microseconds for row in self.rows if row.arm == FLOOR]
        return median(found) if found else None

    def roofline(self, key: Key, part: str = BOTH) -> Row | None:
        """The fastest plain read-only row for the same bytes."""
        found = [r for r in self.rows if (r.arm, r.launch, r.part, r.key) == (ROOFLINE, PLAIN, part, key)]
        return min(found, key=lambda row: row.microseconds, default=None)

    def floor_of(self, key: Key) -> Row | None:
        """The floor that was timed beside these rows."""
        return next((r for r in self.rows if (r.arm, r.key) == (FLOOR, key)), None)

    def ratio(self, row: Row) -> float | None:
        """Time over that of the fastest plain roofline of the same part and bytes; None for an eager time, which
        is the host's as well."""
        against = self.roofline(row.key, row.part)
        return row.microseconds / against.microseconds if against and row.launch != EAGER else None

    def floor_ratio(self, row: Row) -> float | None:
        """Time over that of the separating kernel and two empty kernels."""
        against = self.floor_of(row.key)
        return row.microseconds / against.microseconds if against and row.launch != EAGER else None

    def record(self) -> dict[str, Plain]:
        """Plain JSON types, every sample included; `ratio`, `floor_ratio` and the rate are worked out."""
        return {
            "schema": SCHEMA,
            "gpu": dict(self.gpu),
            "build": self.build,
            "policy": self.policy,
            "policy_digest": self.policy_digest,
            "geometry": dict(self.geometry),
            "protocol": dict(self.protocol),
            "floor": self.floor,
            "rows": [self._row_record(row) for row in self.rows],
            "not_run": [asdict(skipped) for skipped in self.skipped],
            "host": [{**asdict(host), "samples": list(host.samples)} for host in self.host],
            "ok": self.ok,
            **self.extra,
        }

    def _row_record(self, row: Row) -> dict[str, Plain]:
        derived = {
            "gigabytes_per_second": row.gigabytes_per_second,
            "ratio": self.ratio(row),
            "floor_ratio": self.floor_ratio(row),
        }
        return {**asdict(row), "samples": list(row.samples), **derived}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Result:
        """The inverse of `record`. Raises KeyError, TypeError or ValueError for what is none."""
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r}, accepted is {SCHEMA}")
        return cls(
            gpu=dict(record["gpu"]),
            build=record["build"],
            policy=record["policy"],
            policy_digest=record["policy_digest"],
            geometry=dict(record["geometry"]),
            protocol=dict(record["protocol"]),
            rows=tuple(_made(Row, row) for row in record["rows"]),
            skipped=tuple(_made(Skipped, skipped) for skipped in record["not_run"]),
            host=tuple(_made(Host, host) for host in record["host"]),
            extra={key: value for key, value in record.items() if key not in RECORDED},
        )


RECORDED = frozenset(
    ("schema", "gpu", "build", "policy", "policy_digest", "geometry", "protocol", "floor", "rows", "not_run", "host")
) | {"ok"}
"""Keys of a record that are not `extra`."""


def _made(kind: Any, values: Any) -> Any:
    """A dataclass from a mapping that may have derived values besides. Raises ValueError for values of another
    type, and for times that no device can take."""
    try:
        made = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
    if kind in (Row, Host):
        odd = [time for time in (made.microseconds, *made.samples) if not (math.isfinite(time) and time >= 0)]
        if odd or not made.microseconds:
            raise ValueError(f"{kind.__name__}: microseconds {odd[0] if odd else 0}, accepted are numbers above 0")
    return made


def load_result(path: str | Path) -> Result:
    """Read what `sm70-moe bench --json` or `--report` wrote. Raises SettingsError that names the file."""
    record = read_json(Path(path), RESULT)
    try:
        return Result.of_record(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{path}: {type(error).__name__}: {error}; accepted is {RESULT}") from error
