"""Rows of `sm70-moe bench --json` or `--report`, as far as a model can speak of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from sm70_moe.errors import SettingsError
from sm70_moe.files import read_json
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.layout import Metadata
from sm70_moe.prediction.readbuild import MOST_TOKENS
from sm70_moe.prediction.routing import KINDS
from sm70_moe.timings import (
    BOTH,
    DEPENDENT,
    FLOOR,
    FUSED,
    OURS,
    PLAIN,
    RESULT,
    ROOFLINE,
    SCHEMA,
    SEPARATOR,
    W2,
    W13,
    WRONG,
)

ARMS = (SEPARATOR, FLOOR, ROOFLINE, OURS, FUSED)
PARTS = (BOTH, W13, W2)

LEAST, MOST = 0.01, 1e6
"""Microseconds that a row can have taken: no kernel is as fast, and no layer takes a second."""

UNIT = 32
"""Sizes of banks in octets are multiples of it."""

LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One row; `microseconds` a layer, the separating kernel's included. `verdict` is the benchmark's."""

    arm: str
    launch: str
    part: str
    metadata: str
    tokens: int
    routing: str
    distinct: float
    microseconds: float
    verdict: str = ""

    @property
    def name(self) -> str:
        """Different for different rows of a run, once the fastest shape of a roofline is taken."""
        return f"{self.arm} {self.launch} {self.part} {self.metadata} M={self.tokens} {self.routing}"

    @property
    def known(self) -> bool:
        """Does the model speak of it? Graphs, few tokens, right results."""
        arm = self.arm in ARMS and self.launch in (PLAIN, DEPENDENT) and self.routing in KINDS
        return arm and 1 <= self.tokens <= MOST_TOKENS and not self.verdict.startswith(WRONG)

    def check(self) -> None:
        """Raise ValueError for values that no row of a benchmark has."""
        if not LEAST <= self.microseconds <= MOST:
            raise ValueError(f"{self.name}: microseconds {self.microseconds}, accepted are {LEAST} to {MOST:.0f}")
        if not 1 <= self.distinct <= LARGEST:
            raise ValueError(f"{self.name}: distinct {self.distinct}, accepted are numbers from 1 on")
        if self.known:
            for what, value, accepted in (("metadata", self.metadata, [*Metadata]), ("part", self.part, PARTS)):
                if value not in accepted:
                    raise ValueError(f"{self.name}: {what} {value!r}, accepted are {', '.join(accepted)}")


@dataclass(frozen=True, slots=True)
class Run:
    """One run on one GPU. `source` says where the numbers come from, `date` when, if the file says so.

    `build` is empty for a run without native kernels. `digest` is the policy's. `documented`: the file itself says
    where its numbers come from, as one written by hand does; the benchmark writes none that does.
    """

    gpu: str
    build: str
    policy: str
    source: str
    date: str
    rows: tuple[Measured, ...]
    digest: str | None = None
    geometry: Geometry | None = None
    documented: bool = False

    def separator(self, row: Measured) -> float:
        """Microseconds of the separating kernel beside a row: the same number of tokens, else any. 0 without one.

        Raises SettingsError if the row, which includes it, took no longer.
        """
        found = [r for r in self.rows if r.arm == SEPARATOR]
        same = [r for r in found if r.tokens == row.tokens] or found
        time = sum(r.microseconds for r in same) / len(same) if same else 0.0
        if time >= row.microseconds:
            raise SettingsError(
                f"{self.source}: {row.name}: {row.microseconds} microseconds with a separating kernel of {time:g}; "
                "accepted are rows that took longer than it"
            )
        return time

    def check_geometry(self, geometry: Geometry) -> None:
        """Raise SettingsError if the file says that other sizes were timed."""
        if self.geometry is not None and self.geometry != geometry:
            raise SettingsError(
                f"{self.source}: timed with policy {self.policy!r}, {self.geometry.record()}; "
                f"accepted is {geometry.record()}, which the model is asked about"
            )


@dataclass(frozen=True, slots=True)
class Device:
    """What a file says of its GPU, as far as it is read."""

    name: str


@dataclass(frozen=True, slots=True)
class Content:
    """A file, as far as it is read; a file of the benchmark has more."""

    schema: int
    gpu: Device
    build: str | None
    policy: str
    rows: tuple[Measured, ...]
    policy_digest: str | None = None
    geometry: Geometry | None = None
    source: str | None = None
    date: str | None = None


def load_run(path: Path) -> Run:
    """Read a result. Raises SettingsError that names the file and what is wrong with it."""
    record = read_json(path, RESULT)
    try:
        return run_of(record, path.name)
    except ValueError as error:
        raise SettingsError(f"{path}: {type(error).__name__}: {error}; accepted is {RESULT}") from error


def run_of(record: object, name: str) -> Run:
    """Rows that the model speaks of, the fastest where a name stands twice. `name` is the file's.

    Raises ValueError for what no benchmark writes.
    """
    content = msgspec.convert(record, Content)
    if content.schema != SCHEMA:
        raise ValueError(f"schema {content.schema!r}")
    if content.geometry:
        check_sizes(content.geometry)
    found: dict[str, Measured] = {}
    for row in content.rows:
        row.check()
        if row.known and (row.name not in found or row.microseconds < found[row.name].microseconds):
            found[row.name] = row
    return Run(
        gpu=content.gpu.name,
        build=content.build or "",
        policy=content.policy,
        source=content.source or name,
        date=content.date or "",
        rows=tuple(found.values()),
        digest=content.policy_digest,
        geometry=content.geometry,
        documented=bool(content.source),
    )


def check_sizes(geometry: Geometry) -> None:
    """Raise ValueError for sizes of no layer with banks in octets."""
    sizes = geometry.record()
    if not all(1 <= size <= LARGEST for size in sizes.values()) or geometry.top_k > geometry.experts:
        raise ValueError(f"geometry {sizes}, accepted are sizes of 1 to {LARGEST}, and top_k of at most experts")
    if geometry.hidden % UNIT or geometry.intermediate % UNIT:
        raise ValueError(f"geometry {sizes}, accepted are multiples of {UNIT} for hidden and intermediate")
