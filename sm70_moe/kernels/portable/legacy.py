"""The backend that is always there: the contract's arithmetic in torch, on any device."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm70_moe.decision import Finding, Reason
from sm70_moe.facts import LayerFacts
from sm70_moe.layout import ORDERS, BankLayout, BankShape

if TYPE_CHECKING:
    import torch

    from sm70_moe.banks.banks import Banks
    from sm70_moe.numbers.codes import WeightSource

CHUNK_BYTES = 256 << 20
"""Slot outputs and activations that are held at once; more tokens are run in chunks of this size."""

COMBINE_BYTES = 16 << 20
"""Temporaries of the combination of slots: blocks of at most 1 MiB FP64, or of one row."""

SLOT_BYTES = 64
"""Ids, sort order and index tensors of one slot."""

DECODE_BYTES = 16
"""Decoding one weight takes at most this: words, codes and FP32 temporaries, FP16 and FP32 results."""

WIDEST = 4
"""Bytes of the widest activation, FP32; `scratch` is not told the dtype."""

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class LegacyBackend:
    """Any geometry, any number of tokens, FP16, BF16 and FP32; one expert is decoded at a time.

    `chunk_bytes` bounds what depends on the number of tokens.
    """

    chunk_bytes: int = CHUNK_BYTES
    name: str = "legacy"
    native: bool = False
    orders: Set[str] = frozenset(ORDERS)
    options: Set[str] = frozenset()

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        """The dtype of the activations, where the engine gave it; a call's own dtype is checked again."""
        if facts.activations is None:
            return ()
        if facts.activations in DTYPES:
            return (Finding.passed("activation dtype", facts.activations),)
        accepted = ", ".join(DTYPES)
        return (Finding.failed("activation dtype", Reason.ACTIVATION_DTYPE, accepted, facts.activations),)

    def scratch(self, shape: BankShape, top_k: int, tokens: int) -> int:
        """Bytes that one call takes at most beyond its arguments; bounded whatever `tokens` is."""
        token = slot_bytes(shape, top_k, WIDEST)
        slots = min(tokens * token, max(self.chunk_bytes, token))
        largest = 2 * shape.hidden * shape.intermediate
        combined = max(COMBINE_BYTES, 16 * 8 * shape.hidden)
        return slots + largest * DECODE_BYTES + combined if tokens else 0

    def chunk(self, shape: BankShape, top_k: int, element: int) -> int:
        """Tokens that are run at once, at least one; `element` counts bytes of x's dtype."""
        return max(1, self.chunk_bytes // max(1, slot_bytes(shape, top_k, element)))

    def prepare(self, source: WeightSource, layout: BankLayout, shape: BankShape, device: str) -> Banks:
        """Read this rank's weights into banks; every built-in backend reads the same ones."""
        from sm70_moe.reading.loading import prepare

        return prepare(source, layout, shape, device)

    def run(
        self,
        banks: Banks,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        intermediate: torch.Tensor | None = None,
    ) -> None:
        """Write the layer's output; see `Backend.run`.

        Same arguments and number of threads give the same bits, and a row's bits do not depend on
        the other rows. Raises BackendError for banks that are not complete, a shape, dtype or
        device that does not fit, and an output that overlaps another argument or the weights.
        """
        from sm70_moe.kernels.arguments import check_call
        from sm70_moe.kernels.portable.experts import Call, run_experts

        outputs = {"out": out} if intermediate is None else {"out": out, "intermediate": intermediate}
        banks.require_complete()
        check_call(banks, {"x": x, "ids": ids, "weights": weights}, outputs)
        chunk = self.chunk(banks.shape, ids.shape[1], x.element_size())
        run_experts(banks, Call(x, ids, weights, out, intermediate), chunk)


def slot_bytes(shape: BankShape, top_k: int, element: int) -> int:
    """Bytes that one token's slots take: outputs, activations and indices."""
    return top_k * ((shape.hidden + shape.intermediate) * element + SLOT_BYTES)
