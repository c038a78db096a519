"""What stands beside a CUDA source: which versions it has, its kernels, their arguments and budgets.

docs/kernels.md describes the file by example. Anything that is not known is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sm70_moe import opening
from sm70_moe.errors import BackendError
from sm70_moe.files import text_of
from sm70_moe.kernels.build.geometry import FIELDS, Geometry
from sm70_moe.kernels.machinecode.budget import Budget

ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""All that the compiler can target and that have at least Volta's tensor cores."""

KINDS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"ptr": ("Q", 8), "i64": ("q", 8), "i32": ("i", 4), "f32": ("f", 4)}
)
"""Kind of an argument -> its `struct` code and bytes."""

BOUNDS = "bounds"  # threads: as many as the compiled kernel's __launch_bounds__ allow
MOST_THREADS = 1024  # CUDA's limit of threads in a block, all architectures


LARGEST = 2**20
"""Bytes of a manifest."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of a kernel; a bare name is a pointer."""

    name: str
    kind: str

    @property
    def bytes_each(self) -> int:
        return KINDS[self.kind][1]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A `__global__` function: its parameters, threads a block, dynamic shared memory in bytes.

    `threads` is 0 where a version's own `__launch_bounds__` say how many.
    """

    name: str
    arguments: tuple[Argument, ...]
    threads: int
    shared: int
    budget: Budget


@dataclass(frozen=True, slots=True)
class Axis:
    """A macro with one version of the source for each value.

    `tests` has the values that only test builds hold, each with its architectures; `runtime` those
    that no specialised version has.
    """

    name: str
    macro: str
    values: Mapping[str, int]
    tests: Mapping[str, tuple[str, ...]]
    runtime: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The versions and kernels of the source `name`.cu.

    `divides` are the numbers that a layer's sizes must be multiples of, `most` their limits. `spot`: no build
    holds them, they are compiled on the machine that runs them, for its sizes.
    """

    name: str
    summary: str
    geometry: tuple[str, ...]
    runtime: bool
    divides: Mapping[str, int]
    most: Mapping[str, int]
    options: tuple[str, ...]
    architectures: tuple[str, ...]
    axes: tuple[Axis, ...]
    kernels: Mapping[str, Kernel]
    spot: bool = False

    def misfits(self, sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
        """Sizes that the kernels cannot run, each with what is accepted; nothing if they fit."""
        uneven = ((n, f"a multiple of {unit}") for n, unit in self.divides.items() if n in sizes and sizes[n] % unit)
        large = ((n, f"at most {limit}") for n, limit in self.most.items() if n in sizes and sizes[n] > limit)
        return (*uneven, *large)

    def fits(self, geometry: Geometry) -> bool:
        return not self.misfits(geometry.record())


def load_manifest(path: Path) -> Manifest:
    """Read NAME.toml. Raises BackendError that names the file, the key and what is accepted."""
    try:
        document = tomllib.loads(text_of(opening.content(path, LARGEST)))
    except (OSError, ValueError) as error:
        raise BackendError(f"{path}: cannot be read: {opening.reason(error)}") from error
    except RecursionError as error:
        raise BackendError(f"{path}: cannot be read: arrays or tables are nested too deeply") from error
    try:
        return _manifest(path.stem, _Table(document, ""))
    except _Fault as fault:
        raise BackendError(f"{path}: {fault}") from fault


def load_manifests(folder: Path) -> Mapping[str, Manifest]:
    """Every manifest of a folder of sources, by the source's name."""
    return MappingProxyType({path.stem: load_manifest(path) for path in sorted(folder.glob("*.toml"))})


class _Fault(ValueError):
    """A key, what was found and what is accepted."""


class _Table:
    """A table of the file that is read key by key; keys that nobody read are faults."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise _Fault(f"{where}: found {content!r}, accepted is a table")
        self.content: dict[str, Any] = content
        self.where, self.read = where, set[str]()

    def get(self, key: str, kind: type, default: Any) -> Any:
        self.read.add(key)
        value: Any = self.content.get(key, default)
        negative = isinstance(value, int) and value < 0
        if type(value) is not kind or negative:
            wanted = {str: "a text", bool: "true or false", int: "a whole number", list: "an array", dict: "a table"}
            raise _Fault(f"{self.where}{key}: found {value!r}, accepted is {wanted[kind]}")
        return value

    def names(self, key: str, accepted: tuple[str, ...] | None, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        found = self.get(key, list, list(default))
        for name in found:
            if not isinstance(name, str) or (accepted is not None and name not in accepted):
                raise _Fault(f"{self.where}{key}: found {name!r}, accepted are {', '.join(accepted or ('texts',))}")
        return tuple(found)

    def tables(self, key: str) -> dict[str, _Table]:
        return {name: _Table(part, f"{self.where}{key}.{name}.") for name, part in self.get(key, dict, {}).items()}

    def done(self) -> None:
        if unknown := sorted(self.content.keys() - self.read):
            raise _Fault(f"{self.where}{unknown[0]}: not known, accepted are {', '.join(sorted(self.read))}")


def _manifest(name: str, table: _Table) -> Manifest:
    made = Manifest(
        name=name,
        summary=table.get("summary", str, ""),
        geometry=table.names("geometry", FIELDS),
        runtime=table.get("runtime", bool, True),
        divides=_sizes("divides", table.get("divides", dict, {})),
        most=_sizes("most", table.get("most", dict, {})),
        options=table.names("options", None),
        architectures=table.names("architectures", ARCHITECTURES, ARCHITECTURES),
        axes=tuple(_axis(key, part) for key, part in table.tables("axes").items()),
        kernels=MappingProxyType({key: _kernel(key, part) for key, part in table.tables("kernels").items()}),
        spot=table.get("spot", bool, False),
    )
    table.done()
    if not made.kernels:
        raise _Fault("kernels: found none, accepted is at least one table [kernels.NAME]")
    if made.spot and (made.runtime or not made.geometry):
        raise _Fault("spot: found true, accepted with `geometry` and without `runtime`: kernels for one layer's sizes")
    if not made.runtime and not made.geometry:
        raise _Fault("runtime: found false without `geometry`: there would be no version at all")
    return made


def _sizes(where: str, numbers: dict[str, Any]) -> Mapping[str, int]:
    for key, number in numbers.items():
        if key not in FIELDS or type(number) is not int or number < 1:
            raise _Fault(f"{where}.{key}: found {number!r}, accepted are positive numbers for {', '.join(FIELDS)}")
    return MappingProxyType(numbers)


def _axis(name: str, table: _Table) -> Axis:
    values = table.get("values", dict, {})
    if not values or any(type(value) is not int for value in values.values()):
        raise _Fault(f"axes.{name}.values: found {values!r}, accepted are names with whole numbers")
    tests = _Table(table.get("tests", dict, {}), f"axes.{name}.tests.")
    only = {value: tests.names(value, ARCHITECTURES) for value in values if value in tests.content}
    tests.done()
    runtime = table.names("runtime", tuple(values))
    macro = table.get("macro", str, "")
    table.done()
    if not macro.isidentifier():
        raise _Fault(f"axes.{name}.macro: found {macro!r}, accepted is the name of a macro")
    return Axis(name, macro, MappingProxyType(values), MappingProxyType(only), runtime)


def _kernel(name: str, table: _Table) -> Kernel:
    arguments = tuple(_argument(f"kernels.{name}.arguments", text) for text in table.names("arguments", None))
    threads = 0 if table.content.get("threads") == BOUNDS else table.get("threads", int, 0)
    table.read.add("threads")
    if table.content.get("threads") != BOUNDS and not 0 < threads <= MOST_THREADS:
        raise _Fault(f"kernels.{name}.threads: found {threads}, accepted are 1 to {MOST_THREADS}, or {BOUNDS!r}")
    if len({argument.name for argument in arguments}) < len(arguments):
        raise _Fault(f"kernels.{name}.arguments: a name stands twice")
    shared = table.get("shared", int, 0)
    try:
        budget = Budget.of_table(table.get("budget", dict, {}))
    except ValueError as error:
        raise _Fault(f"kernels.{name}.budget.{error}") from error
    table.done()
    return Kernel(name, arguments, threads, shared, budget)


def _argument(where: str, text: str) -> Argument:
    name, colon, kind = text.partition(":")
    if not name.isidentifier() or (colon and kind not in KINDS):
        raise _Fault(f"{where}: found {text!r}, accepted is NAME or NAME:KIND with KIND of {', '.join(KINDS)}")
    return Argument(name, kind or "ptr")
