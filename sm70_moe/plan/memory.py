"""What a layer takes of one rank's memory: banks, and workspace per route and token count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sm70_moe.admission.admit import Admission
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.protocol import Backend, Broken, Configurable
from sm70_moe.layout import BankShape, Metadata

TYPICAL_TOKENS = (1, 8, 128, 8192)
"""Token counts that workspace is stated for, besides the resident count: decode, prefill, a vLLM warm-up and more."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one layer on one rank.

    `metadata` has the bytes of scales and zeros for each layout that is known, `chosen` says which
    one the plan uses. `workspace` is (route, tokens) -> bytes of working memory of one call at most.
    `resident` are bytes that a device keeps for calls of up to `Admission.resident_tokens` tokens, once
    for all of its layers; larger calls take memory as they run.
    """

    weights: int
    metadata: Mapping[Metadata, int]
    chosen: Metadata
    workspace: Mapping[tuple[str, int], int]
    resident: int = 0

    @property
    def banks(self) -> int:
        """Bytes of the prepared banks under the chosen metadata layout."""
        return self.weights + self.metadata[self.chosen]

    @property
    def largest_workspace(self) -> int:
        return max(self.workspace.values(), default=0)

    def record(self) -> dict[str, Plain]:
        return {
            "weights": self.weights,
            "metadata": {m.value: size for m, size in self.metadata.items()},
            "metadata_layout": self.chosen.value,
            "banks": self.banks,
            "resident": self.resident,
            "workspace": [{"route": r, "tokens": t, "bytes": size} for (r, t), size in self.workspace.items()],
        }


def memory_of(admission: Admission) -> Memory | None:
    """Memory of an admitted layer; None where nothing can run it."""
    shape, layout, top_k = bank_shape(admission), admission.layout, admission.facts.top_k
    if shape is None or layout is None or top_k is None:
        return None
    tokens = sorted({*TYPICAL_TOKENS, admission.resident_tokens})
    workspace = {
        (route.name, count): workspace_of(backend(admission, route.backend), shape, top_k, count)
        for route in admission.routes
        for count in tokens
        if route.tokens.first <= count and (route.tokens.last is None or count <= route.tokens.last)
    }
    sizes = {m: shape.bank_bytes(replace(layout, metadata=m)) for m in Metadata}
    weights = sizes[layout.metadata][0]
    kept = resident(admission, shape, top_k)
    return Memory(weights, {m: size for m, (_, size) in sizes.items()}, layout.metadata, workspace, kept)


def resident(admission: Admission, shape: BankShape, top_k: int) -> int:
    """Working memory of native routes, which is lent by the device's arena; the portable one asks torch."""
    tokens = admission.resident_tokens
    found = ((route.tokens, backend(admission, route.backend)) for route in admission.routes)
    return max(
        (
            workspace_of(runs, shape, top_k, min(tokens, span.last or tokens))
            for span, runs in found
            if runs.native and span.first <= tokens
        ),
        default=0,
    )


def workspace_of(runs: Backend, shape: BankShape, top_k: int, tokens: int) -> int:
    """What a backend says; BackendError names one that cannot say it."""
    try:
        return int(runs.workspace(shape, top_k, tokens))
    except Exception as error:  # a plug-in's own fault
        raise BackendError(f"backend {runs.name!r}: workspace() raised {type(error).__name__}: {error}") from error


def bank_shape(admission: Admission) -> BankShape | None:
    """Sizes of this rank's banks; the first ranks get one expert more where they do not divide."""
    facts = admission.facts
    if facts.hidden is None or facts.intermediate_per_rank is None or facts.experts is None:
        return None
    ranks, rank = facts.expert_parallel or 1, facts.expert_rank or 0
    share, rest = divmod(facts.experts, ranks)
    return BankShape(share + (rank < rest), facts.hidden, facts.intermediate_per_rank)


def backend(admission: Admission, name: str) -> Backend:
    """The installed backend of an admitted route, with those of its options that were admitted."""
    found = admission.machine.backends[name]
    assert not isinstance(found, Broken)  # an admitted route's backend has loaded
    chosen = frozenset(d.feature for d in admission.decisions if d.kind == "option" and d.admitted) & found.options
    return found.with_options(chosen) if chosen and isinstance(found, Configurable) else found
