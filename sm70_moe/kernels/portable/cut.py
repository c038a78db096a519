"""How a call is cut into blocks of one expert on a device, from shapes alone; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sm70_moe.layout import BankShape

PIECE_BYTES = 224 << 20
"""Decoded weights and rows that are held at once: pieces much smaller cost more launches than work."""

DECODE_BYTES = 16
"""Decoding one weight takes at most this where products are FP32: words, codes, scales, FP16 and FP32 results."""

HALF_DECODE_BYTES = 8
"""And where they are FP16: of groups of 32, 7 were seen with torch's operations and 4 with a kernel."""

FEWEST, MOST = 16, 128
"""Rows of a block. An empty row costs a row's products, and a block the decoding of an expert."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`rows` to a block, at most `blocks`, `piece` of which are run at once."""

    rows: int
    blocks: int
    piece: int

    @classmethod
    def of(cls, shape: BankShape, slots: int, halves: bool = False) -> Cut:
        """Rows about as many as an expert has on average, as a power of two; `halves`: products are FP16."""
        rows = FEWEST
        while rows < MOST and rows * shape.experts < slots:
            rows *= 2
        blocks = most_blocks(slots, shape.experts, rows)
        return cls(rows, blocks, max(1, min(blocks, PIECE_BYTES // block_bytes(shape, rows, halves))))

    def nbytes(self, shape: BankShape, halves: bool = False) -> int:
        """Bytes that a piece takes at most."""
        return self.piece * block_bytes(shape, self.rows, halves)


def block_bytes(shape: BankShape, rows: int, halves: bool = False) -> int:
    """One block: its larger matrix, its rows of x (as given, without dead rows, in FP32), products and activations."""
    weights = 2 * shape.hidden * shape.intermediate * (HALF_DECODE_BYTES if halves else DECODE_BYTES)
    return weights + rows * (24 * shape.hidden + 40 * shape.intermediate)


def most_blocks(slots: int, experts: int, rows: int) -> int:
    """Blocks that `slots` slots can need: full ones, and one that is not full for each expert."""
    return min(slots, slots // rows + experts)
