"""Reading a cubin: an ELF file with one text section, and notes, for each kernel.

Only what the package's own gate needs. Offsets and types are those of the ELF64 specification; the
`.nv.info` attributes and their codes were read off cubins of NVRTC 12.9.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from sm70_moe.errors import BackendError

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
MACHINE = 190  # EM_CUDA
NO_BITS = 8  # SHT_NOBITS: a size, no bytes
FUNCTION = 2  # STT_FUNC
GLOBAL = 1  # STB_GLOBAL
LONGEST_NAME = 2**12  # bytes; those of ours have fewer than a hundred
OLD_ABI, NEW_ABI = 51, 65  # up to sm_90, and from sm_100: the architecture stands in another byte


@dataclass(frozen=True, slots=True)
class Section:
    """One section; `size` counts bytes also where there are none in the file."""

    name: str
    data: bytes
    size: int
    link: int
    info: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """One symbol; `section` is the index of the section it lies in, `value` its offset there."""

    name: str
    function: bool
    public: bool
    section: int
    value: int
    size: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """An entry of a `.nv.info` section: a code, and its bytes."""

    code: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Cubin:
    """The parts of a cubin. `architecture` is "sm_70" for compute capability 7.0."""

    architecture: str
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]

    @classmethod
    def parse(cls, image: bytes) -> Cubin:
        """Read a cubin. Raises BackendError for bytes that are none, or that end too early."""
        try:
            return _parse(image)
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise BackendError(f"cubin of {len(image)} bytes is damaged: {error}") from error

    def section(self, name: str) -> Section | None:
        return next((section for section in self.sections if section.name == name), None)

    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels: public functions with a text section of their own, sorted."""
        return tuple(
            sorted(s.name for s in self.symbols if s.function and s.public and self.section(f".text.{s.name}"))
        )

    def attributes(self, section: str) -> tuple[Attribute, ...]:
        """Entries of a `.nv.info` section; none if it is not there."""
        found = self.section(section)
        return tuple(_attributes(found.data)) if found else ()


def _parse(image: bytes) -> Cubin:
    ident, _, machine, _, _, segments, table, flags, _, each, number, size, count, names = HEADER.unpack_from(image)
    if not ident.startswith(MAGIC) or machine != MACHINE or size != SECTION.size:
        raise BackendError(f"not a cubin: the first bytes are {image[:8].hex()}")
    if ident[7] not in (OLD_ABI, NEW_ABI):
        raise BackendError(f"cubin with ABI {ident[7]}; accepted are {OLD_ABI} and {NEW_ABI}")
    if segments + each * number > len(image):
        raise ValueError("the table of segments is cut off")
    rows = [SECTION.unpack_from(image, table + i * size) for i in range(count)]
    if sum(row[5] for row in rows if row[1] != NO_BITS) > len(image):
        raise ValueError("sections lie over each other")  # each is copied: a small file would become a large one
    labels = _bytes(image, rows[names])
    sections = tuple(Section(_text(labels, row[0]), _bytes(image, row), row[5], row[6], row[7]) for row in rows)
    architecture = (flags & 0xFF) if ident[7] == OLD_ABI else (flags >> 8 & 0xFF)
    return Cubin(f"sm_{architecture}", sections, tuple(_symbols(sections)))


def _bytes(image: bytes, row: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size, *_ = row
    if kind == NO_BITS:
        return b""
    if offset + size > len(image):
        raise ValueError(f"a section ends at byte {offset + size}")
    return image[offset : offset + size]


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset, offset + LONGEST_NAME)].decode("ascii")


def _symbols(sections: tuple[Section, ...]) -> Iterator[Symbol]:
    table = next((section for section in sections if section.name == ".symtab"), None)
    if table is None:
        raise ValueError("no symbols")
    names = sections[table.link].data
    for name, info, _, section, value, size in SYMBOL.iter_unpack(table.data):
        yield Symbol(_text(names, name), info & 15 == FUNCTION, info >> 4 == GLOBAL, section, value, size)


def _attributes(data: bytes) -> Iterator[Attribute]:
    place = 0
    while place < len(data):
        layout, code, value = struct.unpack_from("<BBH", data, place)
        place += 4
        if layout == 4:  # `value` is the size of what follows; in the other formats it is the value itself
            if place + value > len(data):
                raise ValueError(f"an attribute ends at byte {place + value} of {len(data)}")
            yield Attribute(code, data[place : place + value])
            place += value
        else:
            yield Attribute(code, value.to_bytes(2, "little"))
