"""Which versions of each source a build holds: architectures x geometries x values of the axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from sm70_moe.decision import Plain
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.manifest import Axis, Manifest

GROUP = "group"
"""An axis of this name is narrowed to a policy's prepared group in specialised versions."""


@dataclass(frozen=True, slots=True)
class Version:
    """One cubin: a source, compiled for an architecture with these macros.

    `sizes` are the geometry's fields that are macros; none in the runtime version. `axes` gives a
    value's name for each axis. `test`: only in test builds.
    """

    source: str
    architecture: str
    sizes: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, str], ...]
    test: bool = False

    @property
    def name(self) -> str:
        """Name of the cubin's file, without its ending; different for different versions."""
        shape = "-".join(f"{name}{size}" for name, size in self.sizes) or "runtime"
        return ".".join([self.source, self.architecture, shape, *(value for _, value in self.axes)])

    @property
    def labels(self) -> frozenset[str]:
        """What a budget's exceptions may speak of."""
        pairs = (f"{name}={value}" for name, value in (*self.sizes, *self.axes))
        return frozenset({self.architecture, "specialised" if self.sizes else "runtime", *pairs})

    def macros(self, manifest: Manifest) -> dict[str, int]:
        values = {axis.macro: axis.values[value] for axis, (_, value) in zip(manifest.axes, self.axes, strict=True)}
        return {f"MOE_{name.upper()}": size for name, size in self.sizes} | values

    def record(self) -> dict[str, Plain]:
        return {
            "source": self.source,
            "architecture": self.architecture,
            "sizes": dict(self.sizes),
            "axes": dict(self.axes),
            "test": self.test,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Version:
        """The inverse of `record`. Raises KeyError or TypeError for another shape."""
        sizes = tuple((str(name), int(size)) for name, size in record["sizes"].items())
        axes = tuple((str(name), str(value)) for name, value in record["axes"].items())
        return cls(str(record["source"]), str(record["architecture"]), sizes, axes, bool(record["test"]))


@dataclass(frozen=True, slots=True)
class Scope:
    """What a build was made for; part of its id.

    `exact` are the architectures that get versions for the geometries, all of them if it is None; the
    others have versions for any sizes, and what is specialised on the spot.
    """

    architectures: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    tests: bool = False
    exact: tuple[str, ...] | None = None

    def record(self) -> dict[str, Plain]:
        return {
            "architectures": list(self.architectures),
            "geometries": [geometry.record() for geometry in self.geometries],
            "tests": self.tests,
            "exact": None if self.exact is None else list(self.exact),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Scope:
        """The inverse of `record`. Raises KeyError, TypeError or ValueError for another shape."""
        sizes = tuple(Geometry.of_record(geometry) for geometry in record["geometries"])
        exact = record.get("exact")
        only = None if exact is None else tuple(map(str, exact))
        return cls(tuple(map(str, record["architectures"])), sizes, bool(record["tests"]), only)


def versions(manifests: Iterable[Manifest], scope: Scope) -> tuple[Version, ...]:
    """Every version of these sources, each once, sorted by name."""
    found = {version for manifest in manifests for version in _of_source(manifest, scope)}
    return tuple(sorted(found, key=lambda version: version.name))


def _of_source(manifest: Manifest, scope: Scope) -> Iterator[Version]:
    if manifest.spot:
        return
    fitting = [geometry for geometry in scope.geometries if manifest.fits(geometry)] if manifest.geometry else []
    for architecture in manifest.architectures:
        if architecture not in scope.architectures:
            continue
        exact = fitting if scope.exact is None or architecture in scope.exact else []
        for geometry in [*exact, *([None] if manifest.runtime else [])]:
            for values in product(*(_values(axis, geometry, architecture, scope.tests) for axis in manifest.axes)):
                sizes = geometry.record() if geometry else {}
                yield Version(
                    source=manifest.name,
                    architecture=architecture,
                    sizes=tuple((name, sizes[name]) for name in manifest.geometry if name in sizes),
                    axes=tuple((axis.name, value) for axis, value in zip(manifest.axes, values, strict=True)),
                    test=any(value in axis.tests for axis, value in zip(manifest.axes, values, strict=True)),
                )


def _values(axis: Axis, geometry: Geometry | None, architecture: str, tests: bool) -> Iterator[str]:
    for value in axis.values:
        if value in axis.tests and not (tests and architecture in axis.tests[value]):
            continue
        if geometry is not None and value in axis.runtime:
            continue
        if axis.name == GROUP and geometry is not None and value != str(geometry.group):
            continue
        yield value
