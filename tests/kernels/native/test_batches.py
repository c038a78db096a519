"""How batches are cut: grids, scratch and shared memory of every shape that a layer may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build import SOURCES
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.native import tactics
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.batches import (
    MOST_PRODUCTS,
    PLANNED,
    TILES,
    Batch,
    Cut,
    Scratch,
    counts,
    cut_of,
    most_tokens,
    scratch_bytes,
    steps,
    steps_with,
)
from sm70_moe.kernels.native.case import RULE, Case
from sm70_moe.kernels.native.launch import GRID_LIMITS
from sm70_moe.kernels.native.steps import SCRATCH, numbers
from sm70_moe.layout import BankLayout, BankShape, Metadata

FIRST = BankShape(512, 2560, 160)
SHAPES = (
    (FIRST, 10),
    (BankShape(128, 2048, 768), 8),
    (BankShape(8, 4096, 3584), 2),
    (BankShape(64, 2048, 704), 6),
    (BankShape(60, 2048, 1408), 4),
    (BankShape(256, 3072, 192), 8),
    (BankShape(1024, 16384, 4096), 16),
    (BankShape(1, 32, 32), 1),
)
LIMIT = {"sm_70": 96 << 10, "sm_75": 64 << 10, "sm_80": 96 << 10, "sm_86": 96 << 10, "sm_90": 96 << 10}
"""Bytes of shared memory of a block: what a V100 has, 64 KB on Turing."""

STATIC = 44 << 10
"""Bytes that a kernel of this package declares by itself, at most."""

GIVEN = {"x", "ids", "weights", "out", "intermediate", SCRATCH}
TOKENS = (9, 16, 128, 1000, 6553, 6554, 8192)


def case_of(shape: BankShape, top_k: int, tokens: int, architecture: str = "sm_90", order: str = "octet32") -> Case:
    layout = BankLayout(order, Metadata.THREE_BYTE, 32, True, True)
    return Case(shape, layout, top_k, tokens, architecture, True)


@pytest.mark.parametrize(("tokens", "tile"), [(9, 8), (128, 8), (368, 8), (369, 16), (1024, 32), (8192, 64)])
def test_the_tile_follows_the_slots_of_an_expert(tokens: int, tile: int) -> None:
    """The first whose nine tenths an expert has not on average."""
    assert cut_of(Batch(FIRST, 10, tokens)).tile == tile


@pytest.mark.parametrize("architecture", LIMIT)
@pytest.mark.parametrize(("shape", "top_k"), SHAPES)
def test_blocks_and_grids_are_within_the_hardware(shape: BankShape, top_k: int, architecture: str) -> None:
    """Shared memory and grids of every step; an even number of warps, since rows are copied by such."""
    for tokens in (*TOKENS, most_tokens(shape, top_k)):
        if tokens > most_tokens(shape, top_k):
            continue
        for step in steps(case_of(shape, top_k, tokens, architecture)):
            assert (step.shared or STATIC) + 1024 <= LIMIT[architecture], (tokens, step)
            assert all(1 <= size <= limit for size, limit in zip(step.grid, GRID_LIMITS, strict=False)), (tokens, step)
            assert (step.threads or 64) % 64 == 0


@pytest.mark.parametrize("tokens", [9, 8192])
@pytest.mark.parametrize("order", ["octet32", "tile32x8"])
def test_every_argument_has_a_value(tokens: int, order: str) -> None:
    """Of each kernel that is launched, beside what a call and the banks give."""
    manifests, case = load_manifests(SOURCES), case_of(FIRST, 10, tokens, order=order)
    for step in steps(case):
        kernel = manifests[step.source].kernels[step.kernel]
        own = {a.name for a in kernel.arguments} - GIVEN - numbers(case).keys() - step.values.keys()
        assert all(name.startswith(("w13_", "w2_")) for name in own), (step.kernel, own)


def test_items_are_enough_for_any_routing() -> None:
    """One expert with everything, or all experts with one slot and the rest in whole tiles."""
    for tile in TILES:
        slots = 81_920
        worst = max(-(-slots // tile), 511 + -(-(slots - 511) // tile))
        assert Batch(FIRST, 10, 8192).items(tile) >= worst


def test_parts_of_h_cover_it_once() -> None:
    """Each column of H in one part, the parts one after the other."""
    made = steps_with(case_of(FIRST, 10, 8192), Cut(64, 4, 1, 4, 5, 640))
    parts = [(s.values["first_column"], s.values["columns"]) for s in made if s.kernel == "batch_sum"]
    assert parts == [(0, 640), (640, 640), (1280, 640), (1920, 640)]


SIZES = st.builds(
    BankShape,
    st.integers(1, 1024),
    st.integers(1, 512).map(lambda n: 32 * n),
    st.integers(1, 512).map(lambda n: 32 * n),
)


@given(SIZES, st.integers(1, 16), st.integers(1, 40_000), st.integers(0, 500))
def test_stated_scratch_is_enough_and_grows_with_tokens(shape: BankShape, top_k: int, tokens: int, more: int) -> None:
    """What the parts of a call take is within what is stated of it, and of every longer call; all of it is bounded."""
    piece = min(tokens, most_tokens(shape, top_k))
    batch = Batch(shape, top_k, piece)
    cut = cut_of(batch)
    found = Scratch.of(batch, cut.columns)
    assert 0 < found.order < found.products <= found.size <= scratch_bytes(shape, top_k, tokens)
    assert scratch_bytes(shape, top_k, tokens) <= scratch_bytes(shape, top_k, tokens + more)
    assert scratch_bytes(shape, top_k, tokens) <= MOST_PRODUCTS + (16 << 20)
    assert cut.columns % 32 == 0
    assert cut.columns <= shape.hidden
    assert 64 + 16 * batch.items(cut.tile) <= found.order
    assert found.order + 4 * batch.slots <= found.products
    if batch.slots > PLANNED:  # ranks, and counts of each block and expert, stand where products will
        blocks = -(-batch.slots // (min(16, 8192 // shape.experts) * 256))
        assert found.products + 4 * batch.slots + 4 * blocks * shape.experts <= found.size


@given(SIZES, st.integers(1, 16), st.integers(1, 100_000))
def test_a_backend_states_what_a_piece_takes(shape: BankShape, top_k: int, tokens: int) -> None:
    """Activations and scratch, in whole blocks of torch's allocator; bounded, whatever the call's length."""
    backend, most = NativeBackend("indexed"), most_tokens(shape, top_k)
    piece = min(tokens, most)
    stated = backend.workspace(shape, top_k, tokens)
    assert stated >= piece * top_k * shape.intermediate * 2 + scratch_bytes(shape, top_k, piece)
    assert stated == backend.workspace(shape, top_k, min(tokens, most))
    assert stated <= (800 << 20)


@given(SIZES, st.integers(1, 16), st.integers(1, 20_000))
def test_kernels_change_only_where_it_is_said(shape: BankShape, top_k: int, tokens: int) -> None:
    """A call launches the kernels of the last count that is not beyond it: those are loaded in advance."""
    tokens = min(tokens, most_tokens(shape, top_k))

    def kernels(count: int) -> list[str]:
        launched = [step.kernel for step in steps(case_of(shape, top_k, count))]
        return list(dict.fromkeys(launched))

    near = max(count for count in counts(shape, top_k, 1) if count <= tokens)
    assert kernels(near) == kernels(tokens)


@pytest.mark.parametrize("architecture", LIMIT)
@pytest.mark.parametrize(("shape", "top_k"), SHAPES)
def test_tactics_that_are_offered_can_be_launched(shape: BankShape, top_k: int, architecture: str) -> None:
    """Shared memory, grids, warps and scratch of each, at every number of tokens of its bucket; the rule first."""
    for bucket in tactics.BUCKETS:
        offered = tactics.offered(case_of(shape, top_k, bucket, architecture))
        assert offered[0] == RULE
        assert len(set(offered)) == len(offered) > 1
        for tokens in (tactics.below(bucket) + 1, bucket):
            for name in offered:
                case = replace(case_of(shape, top_k, tokens, architecture), tactic=name)
                for step in tactics.steps(case):
                    assert (step.shared or STATIC) + 1024 <= LIMIT[architecture], (tokens, name, step)
                    assert all(1 <= size <= limit for size, limit in zip(step.grid, GRID_LIMITS, strict=False))
                if name != RULE:
                    cut, batch = tactics.Tactic.of(name).cut(Batch.of(case)), Batch.of(case)
                    assert Scratch.of(batch, cut.columns).size <= scratch_bytes(shape, top_k, tokens)


def test_buckets_and_names() -> None:
    """A call belongs to the first bucket that holds it; a name is read as it was written, or refused."""
    assert [tactics.bucket_of(n) for n in (9, 16, 17, 1024, 1025)] == [16, 16, 32, 1024, None]
    assert str(tactics.Tactic.of("t16.2x1.4x2")) == "t16.2x1.4x2"
    for odd in ("t16.2x1.4x0", "t12.2x1.4x2", "t16.3x1.4x2", "t16.10x1.4x2", "t16.2x1", "rule", ""):
        with pytest.raises(BackendError, match="accepted is one that was offered"):
            tactics.Tactic.of(odd)
