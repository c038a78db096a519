"""The header of a file of prepared banks: which banks they are, where each plane lies, and checksums.

The file is a plain safetensors file: `w13.words` and so on with the experts first, the rest as text
in `__metadata__`. A reader builds the header that the wanted banks have and compares.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm70_moe.banks.banks import Banks
from sm70_moe.files import json_of
from sm70_moe.layout import PLANE_ALIGNMENT

FORMAT = "1"
"""Version of this file format."""

LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer headers too."""

SPARE, PER_EXPERT = 2**16, 64
"""Bytes that a header may have beside its planes, beside a plane's checksums, and for each expert of a plane."""

DTYPES = {"int32": "I32", "float16": "F16", "uint8": "U8"}

Identity = Mapping[str, str]
"""What the banks are, text by text; all of it is compared."""

Sums = Mapping[str, Sequence[int]]
"""CRC-32 of each expert's part of each plane, by the plane's name in the file."""

Reaches = Mapping[int, float]
"""Experts whose sums of W2 can leave FP16: `Banks.reaches`."""

REACHES = "w2 reaches"


class Unusable(Exception):
    """A file is not the one that was asked for, or is damaged; the text says how."""


@dataclass(frozen=True, slots=True)
class Section:
    """One plane of all experts: dtype and shape as safetensors has them, first byte of the data, bytes an expert."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    part: int

    @property
    def end(self) -> int:
        return self.start + self.shape[0] * self.part

    @property
    def record(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": [self.start, self.end]}


def sections(banks: Banks) -> dict[str, Section]:
    """Every plane of both banks, in the order of the file."""
    found: dict[str, Section] = {}
    start = 0
    for matrix, bank in (("w13", banks.w13), ("w2", banks.w2)):
        for plane in bank.packing.order.planes(bank.stored, bank.rows, bank.columns, banks.layout.group):
            shape = (banks.shape.experts, *plane.shape)
            found[f"{matrix}.{plane.name}"] = Section(DTYPES[plane.dtype], shape, start, plane.nbytes)
            start += banks.shape.experts * plane.nbytes
    return found


def header(places: Mapping[str, Section], identity: Identity, sums: Sums, reaches: Reaches) -> bytes:
    """Length and JSON, filled with blanks so that the data starts at a multiple of 256 bytes."""
    told = {"banks": FORMAT, **identity, **{_label(name): _text(values) for name, values in sums.items()}}
    told |= {REACHES: " ".join(f"{expert}:{reach!r}" for expert, reach in reaches.items())} if reaches else {}
    entries = {name: place.record for name, place in places.items()}
    text = json.dumps({"__metadata__": told, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PLANE_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def header_length(prefix: bytes, size: int, places: Mapping[str, Section]) -> int:
    """Bytes of the JSON that follows the first 8 bytes of a file of this size, which has these planes."""
    most = min(LARGEST_HEADER, SPARE + sum(SPARE + PER_EXPERT * place.shape[0] for place in places.values()))
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else most
    if length >= most or 8 + length > size:
        raise Unusable(f"it has no whole header of less than {most} bytes")
    return length


def verify(text: bytes, size: int, places: Mapping[str, Section], identity: Identity) -> tuple[Sums, Reaches]:
    """The checksums and reaches of a header that is just the wanted one; else Unusable. `size` is the file's."""
    try:
        found = json_of(text)
        told = dict(found.pop("__metadata__"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unusable(f"its header cannot be read: {error}") from error
    for key, value in {"banks": FORMAT, **identity}.items():
        if told.get(key) != value:
            raise Unusable(f"{key} is {told.get(key)!r}, wanted is {value!r}")
    if found != {name: place.record for name, place in places.items()}:
        raise Unusable("its tensors are not those of the wanted banks")
    wanted = 8 + len(text) + max(place.end for place in places.values())
    if size != wanted:
        raise Unusable(f"it has {size} bytes, wanted are {wanted}")
    return {name: _values(told, name, place.shape[0]) for name, place in places.items()}, _reaches(told)


def _label(name: str) -> str:
    return f"crc32 {name}"


def _text(values: Sequence[int]) -> str:
    return " ".join(f"{value:08x}" for value in values)


def _values(told: Mapping[str, Any], name: str, experts: int) -> list[int]:
    try:
        values = [int(value, 16) for value in str(told[_label(name)]).split()]
    except (KeyError, ValueError) as error:
        raise Unusable(f"checksums of {name} cannot be read: {error}") from error
    if len(values) != experts:
        raise Unusable(f"{name} has {len(values)} checksums, wanted are {experts}")
    return values


def _reaches(told: Mapping[str, Any]) -> Reaches:
    try:
        pairs = [pair.split(":") for pair in str(told.get(REACHES, "")).split()]
        return {int(expert): float(reach) for expert, reach in pairs}
    except ValueError as error:
        raise Unusable(f"{REACHES} cannot be read: {error}") from error
