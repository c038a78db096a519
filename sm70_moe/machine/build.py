"""Build: what native machine code is installed, for whom, and what its tests said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sm70_moe.kernels.build import Job
from sm70_moe.kernels.build.images import RUN_TIME, SPECIALISED, Choice, digest
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.kernels.native.residency import Residency
from sm70_moe.kernels.native.specialised import Layer, jobs


@dataclass(frozen=True, slots=True)
class Build:
    """The native kernels that are installed.

    `expected` is the build id that this package's sources would give: another `id` is a stale
    build. `images` are the architectures it holds machine code for, `backends` those of each backend
    (None: the same for all; a backend that is left out has no kernels). `self_tests` maps (device,
    backend) to "" for a known-answer call that came out right, else to what went wrong; a `Refusal`
    is the driver's own text. `sizes` are the geometries that kernels of a backend, or of an option of
    one, were made for; `residencies` what a device holds at once of an option's (a text: why nobody knows).
    `specialiser` compiles on this machine what the build lacks (None: nothing is compiled); `refused` are
    the `Choice.images` that it could not make or that failed their proof, and `exact_id` of the build's own.
    """

    id: str
    expected: str
    images: frozenset[str]
    self_tests: Mapping[tuple[str, str], str] = field(default_factory=dict)
    backends: Mapping[str, frozenset[str]] | None = None
    sizes: Mapping[str, tuple[Mapping[str, int], ...]] = field(default_factory=dict)
    residencies: Mapping[tuple[str, str], Residency | str] = field(default_factory=dict)
    specialiser: Specialiser | None = field(default=None, compare=False, repr=False)
    refused: frozenset[str] = frozenset()

    def images_of(self, backend: str) -> frozenset[str]:
        """Architectures for which there is machine code of a backend."""
        return self.images if self.backends is None else self.backends.get(backend, frozenset())

    def specialised(self, name: str) -> tuple[Mapping[str, int], ...]:
        """Sizes by name that a backend's or an option's kernels were made for."""
        return self.sizes.get(name, ())

    def made_for(self, name: str, sizes: Mapping[str, int | None]) -> bool:
        """Are there kernels of a backend or an option for just these sizes? They may name more than kernels ask."""
        return any(made.items() <= sizes.items() for made in self.specialised(name))

    def choice(self, name: str, sizes: Mapping[str, int | None], layer: Layer | None = None) -> Choice:
        """What a layer of these sizes is run with; nothing for a backend that has no kernels here.

        `layer` is the layer itself, where all that chooses kernels is known: they may then be compiled.
        """
        if not self.images_of(name):
            return Choice()
        ours = layer is None or layer.dtype == "float16"  # a build holds no others
        if ours and self.made_for(name, sizes) and self.exact_id(sizes) not in self.refused:
            return Choice(SPECIALISED, self.id)
        wanted = self.wanted(name, sizes, layer)
        images = images_id(wanted)
        if self.specialiser is not None and images not in self.refused and self.specialiser.can(wanted):
            return Choice(SPECIALISED, images)
        return Choice(RUN_TIME, self.id) if ours else Choice()

    def exact_id(self, sizes: Mapping[str, int | None]) -> str:
        """Names the build's kernels for just these sizes."""
        return f"{self.id} " + " ".join(f"{name}{size}" for name, size in sorted(sizes.items()))

    def wanted(self, name: str, sizes: Mapping[str, int | None], layer: Layer | None) -> tuple[Job, ...]:
        """What would be compiled for a layer, with a compiler; nothing where the build has it, or is stale."""
        if self.specialiser is None or layer is None or self.id != self.expected:
            return ()
        if not self.images_of(name) or (layer.dtype == "float16" and self.made_for(name, sizes)):
            return ()
        return jobs(self.specialiser, name, layer)


def images_id(wanted: tuple[Job, ...]) -> str:
    """Names what some compilations give, whoever made it: SHA-256 (hex) over their keys."""
    return digest("\n".join(job.key for job in wanted).encode())
