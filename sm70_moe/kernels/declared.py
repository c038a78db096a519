"""What the built-in backends run: the one home of their token ranges, layouts, dtypes and sizes.

The native steps and the portable backend are made from it, policies are held against it. Sizes stand
in the kernels' manifests, since they follow from the sources, and are read from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sm70_moe.kernels.capability import Capability, Reads, Span
from sm70_moe.layout import ORDERS, Metadata

if TYPE_CHECKING:
    from sm70_moe.kernels.build.manifest import Manifest

BUILT_IN = frozenset({"decode", "grouped", "indexed", "legacy", "qpn"})
"""Names of the backends that come with the package."""

ANY_SIZES = frozenset({"indexed"})
"""Backends whose kernels take sizes as arguments: there are none for a layer's own."""

FUSED = "fused_decode"
"""The option of `qpn` that runs its calls in one launch."""

TUNED = "tune_small_shapes"
"""The option of `indexed` whose batches are cut as was measured to be fastest."""

DTYPES = ("float16", "bfloat16", "float32")

DECODE = Reads(
    orders=frozenset({"octet32", "tile32x8"}),
    groups=frozenset({32, 64, 128}),
    interleaved=frozenset({True}),
    batched=frozenset({True}),
)
"""The kernels take gate c and up c from one octet of columns, and find an expert by its number."""

HALF = frozenset({"float16"})

FUSED_METADATA = frozenset({Metadata.FOUR_BYTE, Metadata.THREE_BYTE})
"""What the fused kernel has versions for."""

ALIGNMENT = 16
"""Bytes: kernels load activations and store outputs 16 bytes at a time (CONTRACT 4)."""


BFLOAT16_FROM = 80
"""sm_80 is the first architecture whose tensor cores take BF16 numbers (as TF32)."""


def decode(tokens: Span, reads: Reads = DECODE, dtypes: frozenset[str] = HALF) -> Capability:
    """What a native kernel asks of a call."""
    return Capability(tokens, reads, dtypes, contiguous=True, alignment=ALIGNMENT)


_TOKENS: Mapping[str, Capability] = MappingProxyType(
    {
        "legacy": Capability(Span(1), Reads(frozenset(ORDERS)), frozenset(DTYPES)),
        "decode": decode(Span(1, 8), dtypes=HALF | {"bfloat16"}),
        "qpn": decode(Span(1, 1)),
        "grouped": decode(Span(2, 8)),
        "indexed": decode(Span(1)),  # any number; fewer than nine are quicker with the decode kernels
        FUSED: decode(Span(1, 1), replace(DECODE, orders=frozenset({"octet32"}), metadata=FUSED_METADATA)),
    }
)
"""Without sizes."""

SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("decode", "qpn", "grouped"), ("decode_w13", "decode_w2")),
        "indexed": ("batch_plan", "batch_sort", "batch_product", "batch_sum"),
        FUSED: ("decode_fused",),
    }
)
"""The CUDA sources of a native backend, or of an option of one: all must be there."""

OWN = Path(__file__).with_name("cuda")
"""The package's own sources, whatever folder a build is made from: what is kept of them holds for the process."""


def declared(name: str) -> Capability | None:
    """What a built-in backend, or an option of one, runs, sizes left out; None if it has no kernels."""
    return _TOKENS.get(name)


@cache
def own_manifest(source: str) -> Manifest:
    """What the package says of one of its own sources: read once, since several backends share most of them."""
    from sm70_moe.kernels.build.manifest import load_manifest

    return load_manifest(OWN / f"{source}.toml")


@cache
def capability(name: str, architecture: str | None = None) -> Capability | None:
    """The same with the sizes that the manifests of its sources accept, on an architecture (None: on any)."""
    found = declared(name)
    if found is None or name not in SOURCES:
        return found
    if architecture is not None and int(architecture.removeprefix("sm_")) < BFLOAT16_FROM:
        found = replace(found, dtypes=found.dtypes - {"bfloat16"})
    manifests = [own_manifest(source) for source in SOURCES[name]]
    multiples: dict[str, int] = {}
    most: dict[str, int] = {}
    for manifest in manifests:
        for size, unit in manifest.divides.items():
            multiples[size] = lcm(unit, multiples.get(size, 1))
        for size, limit in manifest.most.items():
            most[size] = min(limit, most.get(size, limit))
    return replace(found, multiples=MappingProxyType(multiples), most=MappingProxyType(most))
