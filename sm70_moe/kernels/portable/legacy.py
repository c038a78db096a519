"""The backend that is always there: the contract's arithmetic in torch, on any device."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from sm70_moe.decision import Finding
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import capability
from sm70_moe.kernels.portable.cut import DECODE_BYTES, Cut
from sm70_moe.layout import BankLayout, BankShape

if TYPE_CHECKING:
    from sm70_moe.banks.banks import Banks
    from sm70_moe.kernels.call import Call
    from sm70_moe.kernels.protocol import Workspace
    from sm70_moe.numbers.codes import WeightSource

CHUNK_BYTES = 256 << 20
"""Slot outputs and activations that are held at once; more tokens are run in chunks of this size."""

COMBINE_BYTES = 16 << 20
"""Temporaries of the combination of slots: blocks of at most 1 MiB FP64, or of one row."""

SLOT_BYTES = 96
"""Ids, sort order and index tensors of one slot."""

NARROWEST, WIDEST = 2, 4
"""Bytes of FP16 and of FP32 activations; `workspace` is not told the dtype."""

BLOCK_ROW_BYTES = 64
"""One row of a block: its slot's number, place, token and expert as INT64, and what they are made from."""


@dataclass(frozen=True, slots=True)
class LegacyBackend:
    """Any geometry, any number of tokens, FP16, BF16 and FP32; one expert is decoded at a time.

    `chunk_bytes` bounds what depends on the number of tokens.
    """

    chunk_bytes: int = CHUNK_BYTES
    name: str = "legacy"
    native: bool = False
    options: Set[str] = frozenset()

    def can(self, architecture: str | None) -> Capability | None:
        """The same everywhere."""
        return capability(self.name)

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        """Nothing beyond what it can."""
        return ()

    def workspace(self, shape: BankShape, top_k: int, tokens: int) -> int:
        """Bytes that one call takes at most beyond its arguments, with an export or without; bounded
        whatever `tokens` is."""
        return workspace_bytes(self.chunk_bytes, shape, top_k, tokens) if tokens else 0

    def chunk(self, shape: BankShape, top_k: int, element: int) -> int:
        """Tokens that are run at once, at least one; `element` counts bytes of x's dtype."""
        return chunk_tokens(self.chunk_bytes, shape, top_k, element)

    def prepare(self, source: WeightSource, layout: BankLayout, shape: BankShape, device: str) -> Banks:
        """Read this rank's weights into banks; every built-in backend reads the same ones."""
        from sm70_moe.reading.loading import prepare

        return prepare(source, layout, shape, device)

    def ready(self, banks: Banks, top_k: int) -> None:
        """Make what a GPU decodes experts with, before a graph is captured."""
        from sm70_moe.kernels.portable.experts import make_ready

        make_ready(banks)

    def run(self, banks: Banks, call: Call, space: Workspace | None = None) -> None:
        """Write the layer's output; see `Backend.run`.

        Same arguments and number of threads give the same bits, and a row's bits do not depend on
        the other rows. Raises BackendError for banks that are not complete, a shape, dtype or
        device that does not fit, and an output that overlaps another argument or the weights.
        """
        from sm70_moe.kernels.arguments import check_call
        from sm70_moe.kernels.portable.experts import run_experts

        banks.require_complete()
        check_call(banks, call)
        run_experts(banks, call, self.chunk(banks.shape, call.ids.shape[1], call.x.element_size()))


def chunk_tokens(chunk_bytes: int, shape: BankShape, top_k: int, element: int) -> int:
    """Tokens whose slots fit in `chunk_bytes`, at least one."""
    return max(1, chunk_bytes // max(1, slot_bytes(shape, top_k, element)))


@lru_cache(maxsize=256)  # the layers of a model are alike
def workspace_bytes(chunk_bytes: int, shape: BankShape, top_k: int, tokens: int) -> int:
    """See `LegacyBackend.workspace`; `tokens` is not 0."""
    chunks = {e: min(tokens, chunk_tokens(chunk_bytes, shape, top_k, e)) for e in (NARROWEST, WIDEST)}
    held = max(rows * slot_bytes(shape, top_k, element) for element, rows in chunks.items())
    return held + max(host_bytes(shape), *(device_bytes(shape, rows, top_k) for rows in chunks.values()))


def slot_bytes(shape: BankShape, top_k: int, element: int) -> int:
    """Bytes that one token's slots take: outputs, activations (twice where they are exported) and indices."""
    return top_k * ((shape.hidden + 2 * shape.intermediate) * element + SLOT_BYTES)


def host_bytes(shape: BankShape) -> int:
    """One expert's larger matrix while it is decoded and multiplied, and what the combination of slots takes."""
    return 2 * shape.hidden * shape.intermediate * DECODE_BYTES + max(COMBINE_BYTES, 16 * 8 * shape.hidden)


def device_bytes(shape: BankShape, tokens: int, top_k: int) -> int:
    """A piece of blocks or the FP32 sums of all tokens, and the numbers of all blocks' slots."""
    cuts = {halves: Cut.of(shape, tokens * top_k, halves) for halves in (False, True)}
    pieces = [cut.nbytes(shape, halves) for halves, cut in cuts.items()]
    blocks = cuts[False].blocks * cuts[False].rows
    return max(*pieces, 12 * tokens * shape.hidden) + blocks * BLOCK_ROW_BYTES
