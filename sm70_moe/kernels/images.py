"""A folder of cubins: what made them, which versions there are, and reading one that is proved whole.

`BUILD.json` holds the build id, the scope, and the digest of every file. A cubin is read only if it
lies in the folder itself, no link leads to it, and its digest is the one that was written down.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.versions import Scope, Version

RECORD = "BUILD.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Image:
    """One cubin: its version, its file's name and SHA-256 (hex)."""

    version: Version
    file: str
    digest: str

    def record(self) -> dict[str, Plain]:
        return {"file": self.file, "digest": self.digest, **self.version.record()}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Image:
        return cls(Version.of_record(record), str(record["file"]), str(record["digest"]))


@dataclass(frozen=True, slots=True)
class Cubins:
    """The contents of a build's folder, as its record tells them.

    `folder` is resolved, so that a link that is changed later leads nowhere else.
    """

    folder: Path
    id: str
    compiler: str
    scope: Scope
    images: tuple[Image, ...]

    @classmethod
    def open(cls, folder: Path) -> Cubins | None:
        """Read a folder's record; None if there is none. Raises BackendError for one that is damaged."""
        place = folder.resolve()
        try:
            text = (place / RECORD).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise BackendError(f"{place / RECORD}: cannot be read: {error}") from error
        try:
            return cls._of_record(place, json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise BackendError(f"{place / RECORD}: is no record of a build, schema {SCHEMA} ({problem})") from error

    @classmethod
    def _of_record(cls, folder: Path, record: Mapping[str, Any]) -> Cubins:
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r}")
        images = tuple(Image.of_record(image) for image in record["images"])
        return cls(folder, str(record["id"]), str(record["compiler"]), Scope.of_record(record["scope"]), images)

    def record(self) -> dict[str, Plain]:
        return {
            "schema": SCHEMA,
            "id": self.id,
            "compiler": self.compiler,
            "scope": self.scope.record(),
            "images": [image.record() for image in self.images],
        }

    @property
    def architectures(self) -> frozenset[str]:
        return frozenset(image.version.architecture for image in self.images)

    def of_sources(self, sources: Iterable[str]) -> frozenset[str]:
        """Architectures for which there are images of all of these sources."""
        found = [{i.version.architecture for i in self.images if i.version.source == name} for name in sources]
        return frozenset(set[str].intersection(*found)) if found else frozenset()

    def find(self, source: str, architecture: str, sizes: Mapping[str, int], axes: Mapping[str, str]) -> Image:
        """The image of a source for a layer's sizes: a specialised version before the runtime version.

        `axes` has the value of every axis. Raises BackendError that says what there is.
        """
        fitting = [i for i in self.images if self._serves(i.version, source, architecture, sizes, axes)]
        if not fitting:
            there = sorted(i.version.name for i in self.images if i.version.source == source)
            wanted = f"{source} on {architecture} for {dict(sizes)} with {dict(axes)}"
            raise BackendError(f"no image of {wanted} in build {self.id[:16]}; it has {', '.join(there) or 'none'}")
        return max(fitting, key=lambda image: len(image.version.sizes))

    @staticmethod
    def _serves(
        version: Version, source: str, architecture: str, sizes: Mapping[str, int], axes: Mapping[str, str]
    ) -> bool:
        return (
            version.source == source
            and version.architecture == architecture
            and all(sizes.get(name) == size for name, size in version.sizes)
            and dict(version.axes) == axes
        )

    def read(self, image: Image) -> bytes:
        """The bytes of a cubin. Raises BackendError unless they are the ones that the build wrote."""
        path = self.folder / image.file
        if Path(image.file).name != image.file or path.is_symlink() or path.resolve().parent != self.folder:
            raise BackendError(f"{path}: lies outside of {self.folder}, or a link leads to it; it is not loaded")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BackendError(f"{path}: cannot be read: {error.strerror}; rebuild or reinstall") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != image.digest:
            raise BackendError(f"{path}: has digest {digest}, the build wrote {image.digest}; it is not loaded")
        return content
