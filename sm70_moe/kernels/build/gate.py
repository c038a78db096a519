"""Every kernel of a build against its budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build.images import Cubins, Image
from sm70_moe.kernels.build.manifest import Kernel, Manifest
from sm70_moe.kernels.build.versions import Version
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
        for found, told in judged(image.version, cubins.read(image), manifest):
            yield Row(image, found, told)


def judged(version: Version, content: bytes, manifest: Manifest) -> Iterator[tuple[Census, tuple[str, ...]]]:
    """Every kernel of one cubin, with the numbers that break its budget. Raises BackendError as `survey` does."""
    rows = {found.kernel: found for found in census(content)}
    if odd := sorted(rows.keys() ^ manifest.kernels.keys()):
        raise BackendError(f"{version.name}: kernels {', '.join(odd)} stand in the cubin or in the manifest only")
    for name, found in rows.items():
        kernel = manifest.kernels[name]
        yield found, (*kernel.budget.overruns(found, version.labels), *_mismatch(found, kernel, version))


def _mismatch(found: Census, kernel: Kernel, version: Version) -> Iterator[str]:
    """Parameters and architecture that are not those that were declared."""
    declared = tuple(argument.bytes_each for argument in kernel.arguments)
    if found.parameters != declared:
        yield f"parameters of {found.parameters} bytes, the manifest declares {declared}"
    if found.architecture != version.architecture:
        yield f"code for {found.architecture}, expected {version.architecture}"
