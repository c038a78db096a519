"""How a layer's weights lie in a rank's memory, and how many bytes that takes.

The order is the reference layout of CONTRACT 7: tiles of 32 columns x 8 rows of K, one 32-bit word
for eight consecutive K of one column.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TILE_COLUMNS = 32
WORD_ROWS = 8


class Metadata(StrEnum):
    """What is kept for each (group, column)."""

    FOUR_BYTE = "4-byte"  # FP16 scale | FP16 bias << 16
    THREE_BYTE = "3-byte"  # scale low, scale high, zero

    @property
    def bytes_each(self) -> int:
        return {Metadata.FOUR_BYTE: 4, Metadata.THREE_BYTE: 3}[self]


@dataclass(frozen=True, slots=True)
class BankLayout:
    """The tag of a prepared bank; two banks with equal tags are read the same way.

    `interleaved`: columns 2c and 2c + 1 of W13 are gate c and up c; else all gates come first.
    `batched`: all experts of the layer stand in one tensor.
    """

    order: str
    metadata: Metadata
    group: int
    interleaved: bool
    batched: bool

    @property
    def tag(self) -> str:
        columns = "interleaved" if self.interleaved else "gate-up"
        experts = "batched" if self.batched else "per-expert"
        return f"{self.order}/{self.metadata}/group-{self.group}/{columns}/{experts}"


@dataclass(frozen=True, slots=True)
class BankShape:
    """Sizes of one rank's two banks: W13 is (hidden, 2 * intermediate), W2 (intermediate, hidden).

    `intermediate` is per rank, `experts` counts those of this rank.
    """

    experts: int
    hidden: int
    intermediate: int

    @property
    def elements(self) -> int:
        """Weights of all experts together."""
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of the 4-bit codes."""
        return self.elements // 2

    def metadata_bytes(self, metadata: Metadata, group: int) -> int:
        """Bytes of scales and zeros for groups of `group` rows."""
        return self.elements // group * metadata.bytes_each
