"""The kernels of a call, found in a build and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.build import INSTALLED, SOURCES, expected_id
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import Manifest, load_manifests
from sm70_moe.kernels.build.versions import Version
from sm70_moe.kernels.declared import FUSED
from sm70_moe.kernels.machinecode.census import Census, census
from sm70_moe.kernels.machinecode.elf import Cubin
from sm70_moe.kernels.machinecode.flow import flow
from sm70_moe.kernels.machinecode.tasks import tasks
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.launch import Step
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.prediction.fused import Fused, fused_of
from sm70_moe.prediction.hardware import Gpu
from sm70_moe.prediction.work import Call, Image, Work, work_of

PARTS: Mapping[str, str] = {"decode_w13": "w13", "decode_w2": "w2"}
"""Source -> which of a layer's two products it runs."""

BACKENDS = ("decode", "qpn", "grouped")
"""Native backends whose kernels are modelled: one token, and few."""

MOST_NAMES = 3
"""Versions that an error lists beside the one that is missing; a build has dozens."""

MOST_TOKENS = max(STEPS[name].last for name in BACKENDS)


def steps_of(call: Call, architecture: str) -> tuple[Step, ...]:
    """What the package would launch. Raises SettingsError for a number of tokens that has no native kernels."""
    route = next((STEPS[n] for n in BACKENDS if STEPS[n].first <= call.tokens <= STEPS[n].last), None)
    if route is None:
        raise SettingsError(f"tokens {call.tokens}: accepted are 1 to {MOST_TOKENS}, which have native kernels")
    return route.steps(case_of(call, architecture))


def case_of(call: Call, architecture: str) -> Case:
    """What the package plans a call by: banks in octets, plain launches."""
    geometry = call.geometry
    layout = BankLayout("octet32", Metadata(call.metadata), geometry.group, interleaved=True, batched=True)
    shape = BankShape(geometry.experts, geometry.hidden, geometry.intermediate)
    return Case(shape, layout, geometry.top_k, call.tokens, architecture, dependent=False)


@dataclass(frozen=True, slots=True)
class ReadBuild:
    """A build that is read: `stale` if the installed sources would give another.

    `steps` says what is launched for a call on an architecture.
    """

    cubins: Cubins
    stale: bool
    manifests: Mapping[str, Manifest]
    steps: Callable[[Call, str], tuple[Step, ...]] = steps_of
    _read: dict[tuple[str, str], tuple[Cubin, Census]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, folder: Path | None, architecture: str) -> ReadBuild:
        """The build in a folder, or the installed one. Raises BackendError if it lacks the architecture."""
        cubins = Cubins.open(folder or INSTALLED)
        if cubins is None:
            raise BackendError(
                f"{folder or INSTALLED}: no native build, and a prediction is read off its machine code; accepted is a "
                "folder with one, or an installation with kernels (SM70_MOE_BUILD_KERNELS=1)"
            )
        if architecture not in cubins.of_sources(PARTS):
            found = ", ".join(sorted(cubins.architectures)) or "none"
            raise BackendError(f"{cubins.folder}: no kernels for {architecture}, which is asked for; it has {found}")
        return cls(cubins, cubins.id != expected_id(cubins, own=folder is None), load_manifests(SOURCES))

    def works(self, call: Call, architecture: str) -> tuple[Work, ...]:
        """The call's kernels in order. Raises BackendError for those that are not modelled."""
        return tuple(self._work(call, step, architecture) for step in self.steps(call, architecture))

    def fused(self, call: Call, gpu: Gpu) -> Fused:
        """The call in one launch. Raises BackendError that says what is missing where it cannot be read."""
        route = STEPS[FUSED]
        kinds = sorted(kind.value for kind in route.runs.reads.metadata)
        if call.tokens not in route.runs.tokens or call.metadata not in kinds:
            raise BackendError(
                f"no kernel in one launch for M = {call.tokens} and {call.metadata} metadata; accepted are M = "
                f"{route.first} to {route.last}, {', '.join(kinds)}"
            )
        (step,) = route.steps(case_of(call, gpu.architecture))
        cubin, found = self._kernel(call.geometry, step, gpu.architecture)
        return fused_of(call, tasks(cubin, step.kernel), found, step.grid[0], gpu)

    def _work(self, call: Call, step: Step, architecture: str) -> Work:
        if step.source not in PARTS:
            raise BackendError(f"kernel {step.kernel!r} of {step.source!r} is not modelled; accepted are {list(PARTS)}")
        cubin, found = self._kernel(call.geometry, step, architecture)
        way = flow(cubin, step.kernel)
        threads = step.threads or self.manifests[step.source].kernels[step.kernel].threads or way.threads
        shared = found.shared + (step.shared or self.manifests[step.source].kernels[step.kernel].shared)
        grid = (step.grid[0], step.grid[1] if len(step.grid) > 1 else 1)
        return work_of(call, PARTS[step.source], Image(way, architecture, found.registers, shared, threads, grid))

    def _kernel(self, geometry: Geometry, step: Step, architecture: str) -> tuple[Cubin, Census]:
        manifest = self.manifests.get(step.source)
        if manifest is None:
            there = ", ".join(self.manifests)
            raise BackendError(f"no source {step.source!r} with build {self.cubins.id[:16]}; there are {there}")
        axes = {axis.name: next(iter(axis.values)) for axis in manifest.axes} | dict(step.axes)
        try:
            image = self.cubins.find(step.source, architecture, geometry.record(), axes)
        except BackendError:
            sizes = tuple((name, size) for name, size in geometry.record().items() if name in manifest.geometry)
            raise self._lacking(Version(step.source, architecture, sizes, tuple(axes.items()))) from None
        key = image.digest, step.kernel
        if key not in self._read:
            content = self.cubins.read(image)
            found = next((c for c in census(content) if c.kernel == step.kernel), None)
            if found is None:
                raise BackendError(f"{image.version.name}: has no kernel {step.kernel!r}; build again")
            self._read[key] = Cubin.parse(content), found
        return self._read[key]

    def _lacking(self, wanted: Version) -> BackendError:
        """An error that names the missing version, and those of its source and architecture that are most like it."""
        stem = f"{wanted.source}.{wanted.architecture}."
        there = [i.version for i in self.cubins.images if i.version.name.startswith(stem)]
        there.sort(key=lambda v: (v.sizes != wanted.sizes, v.axes != wanted.axes, v.name))
        names = [version.name.removeprefix(stem) for version in there[:MOST_NAMES]]
        more = f" and {len(there) - MOST_NAMES} more" if len(there) > MOST_NAMES else ""
        found = f"of {wanted.source} for {wanted.architecture} it has {', '.join(names) or 'none'}{more}"
        return BackendError(f"build {self.cubins.id[:16]} has no {wanted.name}; {found}")
