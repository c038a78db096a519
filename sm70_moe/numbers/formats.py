"""The formats that can be read, as data: another one is another row of `FORMATS`.

A matrix of K rows (inputs) and N columns (outputs) is stored as a few tensors. Each is described by
what its dimensions count, how many numbers an element holds, and in which order the numbers of a
word stand; `shapes` checks files against that, `source` cuts a rank's part, `decoding` unpacks it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

VALUES = 8
"""4-bit values in one word."""

BITS = 4

Order = tuple[int, int, int, int, int, int, int, int]
"""The nibble, counted from the lowest bits, that holds value 0, 1, ... 7."""

INTERLEAVED: Order = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's order (CONTRACT 6)."""
STRAIGHT: Order = (0, 1, 2, 3, 4, 5, 6, 7)
"""Lowest nibble first, as GPTQ and compressed-tensors pack."""

ONE_EACH = 0x11111111
"""One in every nibble of a word."""

WEIGHT = "weight"
"""Kind of an unquantised tensor."""


class Axis(StrEnum):
    """What a dimension of a stored tensor runs over."""

    K = "rows"
    GROUP = "groups of rows"
    N = "columns"
    FIXED = "elements"  # as many for every matrix


Spans = Mapping[Axis, range]
"""A part of a matrix, or all of it: which rows, groups and columns."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension; an element holds `each` numbers along it."""

    axis: Axis
    each: int = 1

    def span(self, spans: Spans) -> range:
        """The elements that hold this part."""
        if self.axis is Axis.FIXED:
            return range(self.each)
        whole = spans[self.axis]
        return range(whole.start // self.each, whole.stop // self.each)


K, N, GROUP = Dim(Axis.K), Dim(Axis.N), Dim(Axis.GROUP)
K_WORDS, N_WORDS = Dim(Axis.K, VALUES), Dim(Axis.N, VALUES)
WORD = ("I32",)
FLOATS = ("F16", "BF16")
INDICES = ("I32", "I64")
INTEGERS = ("I64", "I32", "I16", "U64", "U32", "U16")
"""Of tensors that are only compared: two numbers are two numbers, whatever integers a writer chose."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of a matrix's tensors: its name's last component, dtypes and dimensions.

    `order` is for words of 4-bit values. `plus` is added to a whole word, with carries and modulo
    2^32, before it is taken apart.
    """

    kind: str
    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]
    order: Order | None = None
    plus: int = 0

    def spans(self, spans: Spans) -> tuple[range, ...]:
        return tuple(dim.span(spans) for dim in self.dims)

    def shape(self, spans: Spans) -> tuple[int, ...]:
        return tuple(map(len, self.spans(spans)))

    @property
    def packed(self) -> int:
        """The dimension along which a word holds its values."""
        return next(place for place, dim in enumerate(self.dims) if dim.each == VALUES)


@dataclass(frozen=True, slots=True)
class Format:
    """How one format stores a matrix. `name` and `packing` are those of `LayerFacts`.

    `zeros_always`: symmetric files have zeros too. `index` is the group of each row; a file may have
    it, and it must be the plain one. `sizes` holds N and K; tensors of stacked experts do without.
    """

    name: str
    packing: str
    codes: Part
    zeros: Part
    scales: Part
    zeros_always: bool = False
    index: Part | None = None
    sizes: Part | None = None

    def parts(self, present: Collection[str], zero_point: bool | None, stacked: bool = False) -> tuple[Part, ...]:
        """The tensors that every matrix needs, given the kinds that some matrix has.

        A symmetric file may store its zeros, all 8, or leave them out (docs/formats.md).
        """
        wanted = {self.codes.kind: True, self.scales.kind: True}
        wanted[self.zeros.kind] = self.zeros_always or zero_point is not False or self.zeros.kind in present
        if self.index is not None:
            wanted[self.index.kind] = self.index.kind in present
        if self.sizes is not None:
            wanted[self.sizes.kind] = not stacked or self.sizes.kind in present
        return tuple(part for part in self.all if wanted[part.kind])

    @property
    def all(self) -> tuple[Part, ...]:
        """Every tensor that a matrix may have, in the order in which missing ones are told."""
        return tuple(part for part in (self.codes, self.zeros, self.scales, self.index, self.sizes) if part)


AWQ = Format(
    name="awq",
    packing="gemm",
    codes=Part("qweight", WORD, (K, N_WORDS), INTERLEAVED),
    # equal to the codes' order today, but a fact of its own: decoders elsewhere got only one right
    zeros=Part("qzeros", WORD, (GROUP, N_WORDS), INTERLEAVED),
    scales=Part("scales", FLOATS, (GROUP, N)),
)

GPTQ_V2 = Format(
    name="gptq",
    packing="gptq_v2",
    codes=Part("qweight", WORD, (K_WORDS, N), STRAIGHT),
    zeros=Part("qzeros", WORD, (GROUP, N_WORDS), STRAIGHT),
    scales=Part("scales", FLOATS, (GROUP, N)),
    zeros_always=True,
    index=Part("g_idx", INDICES, (K,)),
)

GPTQ_V1 = Format(
    name="gptq",
    packing="gptq",
    codes=GPTQ_V2.codes,
    # stored is the word of zeros minus ONE_EACH: a zero of 0 borrows from the next column
    zeros=Part("qzeros", WORD, (GROUP, N_WORDS), STRAIGHT, plus=ONE_EACH),
    scales=GPTQ_V2.scales,
    zeros_always=True,
    index=GPTQ_V2.index,
)

COMPRESSED = Format(
    name="compressed-tensors",
    packing="pack-quantized",
    # offset binary, codes and zeros alike: nibble = value + 8, so a difference of nibbles is one of values
    codes=Part("weight_packed", WORD, (N, K_WORDS), STRAIGHT),
    zeros=Part("weight_zero_point", WORD, (N_WORDS, GROUP), STRAIGHT),
    scales=Part("weight_scale", FLOATS, (N, GROUP)),
    index=Part("weight_g_idx", INDICES, (K,)),
    sizes=Part("weight_shape", INTEGERS, (Dim(Axis.FIXED, 2),)),
)

FORMATS = (AWQ, COMPRESSED, GPTQ_V1, GPTQ_V2)

ACT_ORDER = "act-order"
"""Added to the packing of a layer whose rows are permuted among the groups."""

READABLE: Mapping[str, tuple[str, ...]] = {
    name: tuple(found.packing for found in FORMATS if found.name == name)
    for name in dict.fromkeys(found.name for found in FORMATS)
}
"""Formats, with their packings, that banks can be prepared from."""

CODE_KINDS = frozenset(found.codes.kind for found in FORMATS)
"""Kinds of tensors that only a quantised matrix has."""


def find(name: str | None, packing: str | None) -> Format | None:
    """The format of this name and packing; None if it cannot be read."""
    return next((found for found in FORMATS if (found.name, found.packing) == (name, packing)), None)


def accepted() -> str:
    """What can be read, for messages."""
    listed = ", ".join(f"{name} ({' or '.join(packings)})" for name, packings in READABLE.items())
    return f"{listed}, each with {BITS} bits"
