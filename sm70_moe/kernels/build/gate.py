"""Every kernel of a build against its budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build.images import Cubins, Image
from sm70_moe.kernels.build.manifest import Kernel, Manifest
from sm70_moe.kernels.machinecode.census import Census, census


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one cubin: what was found, and every number that breaks its budget."""

    image: Image
    found: Census
    overruns: tuple[str, ...]


def survey(cubins: Cubins, manifests: Mapping[str, Manifest]) -> Iterator[Row]:
    """Read every cubin of a build. Raises BackendError for one that is damaged or is not the build's own."""
    for image in cubins.images:
        manifest = manifests.get(image.version.source)
        if manifest is None:
            raise BackendError(f"{image.version.name}: no manifest of a source {image.version.source!r}")
        rows = {found.kernel: found for found in census(cubins.read(image))}
        if odd := sorted(rows.keys() ^ manifest.kernels.keys()):
            raise BackendError(
                f"{image.version.name}: kernels {', '.join(odd)} stand in the cubin or in the manifest only"
            )
        for name, found in rows.items():
            kernel = manifest.kernels[name]
            told = (*kernel.budget.overruns(found, image.version.labels), *_mismatch(found, kernel, image))
            yield Row(image, found, told)


def _mismatch(found: Census, kernel: Kernel, image: Image) -> Iterator[str]:
    """Parameters and architecture that are not those that were declared."""
    declared = tuple(argument.bytes_each for argument in kernel.arguments)
    if found.parameters != declared:
        yield f"parameters of {found.parameters} bytes, the manifest declares {declared}"
    if found.architecture != image.version.architecture:
        yield f"code for {found.architecture}, expected {image.version.architecture}"
