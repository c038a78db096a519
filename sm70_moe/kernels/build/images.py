"""A build's folder: what made it, which cubins there are, and reading one that is proved whole.

The cubins of one source and architecture stand in one packed file, since they are much alike: a wheel
is less than half as large. `BUILD.json` holds the build id, the scope, and the digests of every file
and every cubin. A file is read only if it lies in the folder itself, no link leads to it, and its
digest is the one that was written down.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sm70_moe import opening
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.files import json_of
from sm70_moe.kernels.build.versions import Scope, Version

RECORD = "BUILD.json"
SCHEMA = 1

LARGEST_RECORD, LARGEST_PACK, LARGEST_UNPACKED = 2**24, 2**26, 2**28
"""Bytes of a record, of a packed file, and of what is in one: some hundred times those of a build of everything."""

MOST_MEMORY = 2**27
"""Bytes that unpacking may take: eight times what files need that `pack` has made."""


@dataclass(frozen=True, slots=True)
class Image:
    """One cubin: its version, the file that it is packed in, its place there in bytes, its SHA-256 (hex)."""

    version: Version
    file: str
    start: int
    size: int
    digest: str

    def record(self) -> dict[str, Plain]:
        place: dict[str, Plain] = {"file": self.file, "start": self.start, "size": self.size, "digest": self.digest}
        return place | self.version.record()

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Image:
        start, size = int(record["start"]), int(record["size"])
        return cls(Version.of_record(record), str(record["file"]), start, size, str(record["digest"]))


class Images(Protocol):
    """Machine code of one origin: installed with the package, or compiled on this machine."""

    @property
    def id(self) -> str:
        """Names everything that the code was made from."""

    @property
    def scope(self) -> Scope: ...

    def of_sources(self, sources: Iterable[str]) -> frozenset[str]:
        """Architectures for which there are images of all of these sources."""

    def find(self, source: str, architecture: str, sizes: Mapping[str, int], axes: Mapping[str, str]) -> Image:
        """The image of a source for a layer's sizes; see `Cubins.find`."""

    def read(self, image: Image) -> bytes:
        """The bytes of a cubin. Raises BackendError unless they are the ones that were made."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a planned route launches: kernels made for these sizes or for any, and of which build.

    Empty for a backend without machine code of ours. `tactics` were chosen by tuning: the largest number of tokens
    of a bucket, and how its calls are run.
    """

    version: str = ""
    images: str = ""
    tactics: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        tuned = "tuned " + ",".join(f"{bucket}:{tactic}" for bucket, tactic in self.tactics) if self.tactics else ""
        return " ".join(filter(None, (self.version, self.images[:16], tuned)))


SPECIALISED, RUN_TIME = "specialised", "run-time"
"""Versions of kernels: for one geometry, or with sizes as arguments."""


@dataclass(frozen=True, slots=True)
class Cubins:
    """The contents of a build's folder, as its record tells them.

    `folder` is resolved, so that a link that is changed later leads nowhere else. `files` has the
    SHA-256 (hex) of each packed file.
    """

    folder: Path
    id: str
    compiler: str
    scope: Scope
    files: Mapping[str, str]
    images: tuple[Image, ...]
    _unpacked: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def write(cls, folder: Path, build_id: str, compiler: str, scope: Scope, cubins: Mapping[Version, bytes]) -> Cubins:
        """Pack cubins into a folder, and write the record."""
        packs: dict[str, bytes] = {}
        images: list[Image] = []
        for version, content in cubins.items():
            file = f"{version.source}.{version.architecture}.xz"
            before = packs.get(file, b"")
            images.append(Image(version, file, len(before), len(content), digest(content)))
            packs[file] = before + content
        with ThreadPoolExecutor() as pool:
            packed = dict(zip(packs, pool.map(pack, packs.values()), strict=True))
        for file, content in packed.items():
            (folder / file).write_bytes(content)
        files = {file: digest(content) for file, content in packed.items()}
        made = cls(folder.resolve(), build_id, compiler, scope, files, tuple(images))
        (folder / RECORD).write_text(json.dumps(made.record(), indent=1) + "\n", encoding="utf-8")
        return made

    @classmethod
    def open(cls, folder: Path) -> Cubins | None:
        """Read a folder's record; None if there is none. Raises BackendError for one that is damaged."""
        try:
            place = Path(os.path.realpath(folder))
            content = opening.content(place / RECORD, LARGEST_RECORD, linked=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise BackendError(f"{folder / RECORD}: cannot be read: {opening.reason(error)}") from error
        try:
            return cls._of_record(place, json_of(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise BackendError(f"{place / RECORD}: is no record of a build, schema {SCHEMA} ({problem})") from error

    @classmethod
    def _of_record(cls, folder: Path, record: Mapping[str, Any]) -> Cubins:
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r}")
        images = tuple(Image.of_record(image) for image in record["images"])
        files = {str(name): str(value) for name, value in record["files"].items()}
        scope = Scope.of_record(record["scope"])
        return cls(folder, str(record["id"]), str(record["compiler"]), scope, files, images)

    def record(self) -> dict[str, Plain]:
        return {
            "schema": SCHEMA,
            "id": self.id,
            "compiler": self.compiler,
            "scope": self.scope.record(),
            "files": dict(self.files),
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
        if image.file not in self._unpacked:
            size = max(other.start + other.size for other in (*self.images, image) if other.file == image.file)
            self._unpacked[image.file] = unpack(image.file, self._whole(image.file), size)
        content = self._unpacked[image.file][image.start : image.start + image.size]
        if digest(content) != image.digest:
            raise BackendError(f"{image.version.name}: has digest {digest(content)}, the build wrote {image.digest}")
        return content

    def _whole(self, file: str) -> bytes:
        """A packed file of the folder, as it was written."""
        path = self.folder / file
        if Path(file).name != file or file in ("", "..") or os.path.islink(path):
            raise BackendError(f"{path}: lies outside of {self.folder}, or a link leads to it; it is not loaded")
        try:
            content = opening.content(path, LARGEST_PACK, linked=False)
        except OSError as error:
            raise BackendError(f"{path}: cannot be read: {error.strerror}; rebuild or reinstall") from error
        if digest(content) != self.files.get(file):
            raise BackendError(
                f"{path}: has digest {digest(content)}, the build wrote {self.files.get(file)}; it is not loaded"
            )
        return content


def pack(content: bytes) -> bytes:
    """Compressed bytes."""
    packed: bytes = _lzma().compress(content)
    return packed


def unpack(name: str, content: bytes, size: int) -> bytes:
    """The inverse of `pack`, of `size` bytes; `name` names the file in an error. Makes no more bytes than that."""
    lzma = _lzma()
    if size > LARGEST_UNPACKED:
        raise BackendError(f"{name}: its images have {size} bytes; at most {LARGEST_UNPACKED} are accepted")
    packed = lzma.LZMADecompressor(memlimit=MOST_MEMORY)
    try:
        whole: bytes = packed.decompress(content, size + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise BackendError(f"{name}: cannot be unpacked: {error}") from error
    if len(whole) != size or not packed.eof or packed.unused_data:
        found = f"{len(whole)} bytes" if len(whole) <= size else f"more than {size} bytes"
        raise BackendError(f"{name}: unpacks to {found}; its record has images of {size}")
    return whole


def _lzma() -> Any:
    """The standard library's module, which some builds of Python leave out."""
    try:
        import lzma
    except ImportError as error:
        raise BackendError(f"this Python cannot unpack native kernels: {error}") from error
    return lzma


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
