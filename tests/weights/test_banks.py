"""Prepared banks: order, metadata, arithmetic and completeness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import BackendError
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.weights import metadata, tiles
from sm70_moe.weights.banks import allocate, prepare
from sm70_moe.weights.codes import Codes, ExpertCodes

BOTH = (Metadata.FOUR_BYTE, Metadata.THREE_BYTE)


def layout(
    kind: Metadata = Metadata.FOUR_BYTE, group: int = 32, interleaved: bool = True, batched: bool = True
) -> BankLayout:
    return BankLayout("tile32x8", kind, group, interleaved, batched)


def halves(*bits: int) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint16).view(np.float16))


def bits(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return tensor.contiguous().numpy().view(np.uint16)


def fused(q: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The contract's weight, by FP64: exact sums there, one rounding to FP16 at each of its points."""
    bias = (-zero.astype(np.float64) * scale.astype(np.float64)).astype(np.float16)
    return (q.astype(np.float64) * scale.astype(np.float64) + bias.astype(np.float64)).astype(np.float16)


def random_codes(rng: np.random.Generator, k: int, n: int, group: int) -> Codes:
    scales = rng.uniform(-0.05, 0.05, (k // group, n)).astype(np.float16)
    return Codes(
        torch.from_numpy(rng.integers(0, 16, (k, n), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 16, (k // group, n), dtype=np.uint8)),
        torch.from_numpy(scales),
    )


class RandomSource:
    """Experts with random codes, the same whenever they are read."""

    def __init__(self, shape: BankShape) -> None:
        self.shape = shape

    @property
    def experts(self) -> int:
        return self.shape.experts

    def read(self, expert: int, group: int) -> ExpertCodes:
        rng = np.random.default_rng(expert)
        hidden, inner = self.shape.hidden, self.shape.intermediate
        return ExpertCodes(
            random_codes(rng, hidden, inner, group),
            random_codes(rng, hidden, inner, group),
            random_codes(rng, inner, hidden, group),
        )


def weights_of(codes: Codes) -> np.ndarray:
    group = codes.codes.shape[0] // codes.scales.shape[0]
    zeros, scales = (np.repeat(tensor.numpy(), group, axis=0) for tensor in (codes.zeros, codes.scales))
    return fused(codes.codes.numpy(), zeros, scales).T


def test_the_contracts_word_and_nibble() -> None:
    """K = 2560, N = 320: code (35, 70) is in word 20614, nibble 5."""
    codes = torch.zeros(2560, 320, dtype=torch.uint8)
    codes[35, 70] = 15
    words = tiles.pack(codes).flatten()
    assert words.nonzero().flatten().tolist() == [20614]
    assert words[20614].item() == 15 << (4 * 5)


@pytest.mark.parametrize(("row", "nibble"), list(enumerate((0, 4, 1, 5, 2, 6, 3, 7))))
def test_every_row_of_a_word_has_its_nibble(row: int, nibble: int) -> None:
    """k' = k mod 8 sits in nibble ((k' & 1) << 2) + (k' >> 1)."""
    codes = torch.zeros(8, 32, dtype=torch.uint8)
    codes[row, 3] = 9
    assert tiles.pack(codes).view(torch.uint8).sum().item() in (9, 9 << 4)
    assert (int(tiles.pack(codes)[0, 0, 3].item()) >> (4 * nibble)) & 15 == 9


@given(st.integers(1, 5), st.integers(1, 80), st.integers(0, 2**32 - 1))
def test_packing_and_unpacking_are_inverse(words: int, columns: int, seed: int) -> None:
    """For any geometry, also one that does not fill its last tile."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 16, (8 * words, columns), dtype=np.uint8))
    packed = tiles.pack(codes)
    assert packed.shape == (-(-columns // 32), words, 32)
    assert torch.equal(tiles.unpack(packed, columns), codes.t().short())


def test_the_contracts_metadata() -> None:
    """Scale 0x211F with zero 8: 0xAD1F211F in four bytes, 1F 21 08 in three."""
    scale, zero = halves(0x211F).view(1, 1), torch.tensor([[8]], dtype=torch.uint8)
    assert metadata.encode(Metadata.FOUR_BYTE, scale, zero).item() == 0xAD1F211F - 2**32
    assert metadata.encode(Metadata.THREE_BYTE, scale, zero).tolist() == [[[0x1F, 0x21, 0x08]]]


def one_weight(q: int, zero: int, scale: int, kind: Metadata) -> int:
    """Bits of one weight, through a whole bank."""
    matrix = Codes(
        torch.full((32, 32), q, dtype=torch.uint8),
        torch.full((1, 32), zero, dtype=torch.uint8),
        halves(scale).expand(1, 32).contiguous(),
    )
    banks = allocate(layout(kind), BankShape(1, 32, 32), "cpu")
    banks.fill(0, ExpertCodes(matrix, matrix, matrix))
    found = np.unique(bits(banks.w13.dequantise(0)))
    assert np.array_equal(found, np.unique(bits(banks.w2.dequantise(0))))
    (value,) = found.tolist()
    return int(value)


@pytest.mark.parametrize("kind", BOTH)
def test_the_contracts_rounding(kind: Metadata) -> None:
    """A weight is a fused multiply-add and not the product of a difference."""
    assert one_weight(1, 3, 0x068E, kind) == 0x8A8D
    assert one_weight(3, 3, 0x211F, kind) == 0x0080


def test_every_code_and_zero_with_every_scale() -> None:
    """All 256 pairs with all 63,488 finite scales, subnormal and negative ones too, bit for bit.

    One column for each pair of scale and zero, 16 rows for the codes.
    """
    pattern = np.arange(65536, dtype=np.uint16).view(np.float16)
    scales = pattern[np.isfinite(pattern)]
    assert scales.size == 63488
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], scales.size, axis=1)
    words = tiles.pack(torch.from_numpy(codes))
    for zero in range(16):
        scale = torch.from_numpy(scales).view(1, -1)
        zeros = torch.full(scale.shape, zero, dtype=torch.uint8)
        with np.errstate(over="ignore"):
            expected = fused(codes, zeros.numpy(), scales)
        for kind in BOTH:
            found = tiles.dequantise(words, *metadata.decode(kind, metadata.encode(kind, scale, zeros)))
            assert np.array_equal(bits(found), expected.T.copy().view(np.uint16)), (zero, kind)


def test_both_metadata_layouts_decode_to_the_same_bits() -> None:
    """Scale and bias of every finite scale and zero, signed zeros included."""
    pattern = np.arange(65536, dtype=np.uint16).view(np.float16)
    scale = torch.from_numpy(pattern[np.isfinite(pattern)]).expand(16, -1).contiguous()
    zero = torch.arange(16, dtype=torch.uint8).unsqueeze(1).expand_as(scale).contiguous()
    four, three = (metadata.decode(kind, metadata.encode(kind, scale, zero)) for kind in BOTH)
    for left, right in zip(four, three, strict=True):
        assert np.array_equal(bits(left), bits(right))
    assert np.array_equal(bits(four[0]), bits(scale))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_layer_is_its_experts(kind: Metadata, interleaved: bool, batched: bool) -> None:
    """Each expert's weights come back; columns 2c and 2c + 1 are gate and up c, or gates come first."""
    shape = BankShape(3, 64, 32)
    source = RandomSource(shape)
    banks = prepare(source, layout(kind, 32, interleaved, batched), shape, "cpu")
    assert isinstance(banks.w13.weights, torch.Tensor) is batched
    for expert in range(3):
        codes = source.read(expert, 32)
        gate, up, down = (weights_of(matrix) for matrix in (codes.gate, codes.up, codes.down))
        w13 = np.stack((gate, up), axis=1).reshape(64, 64) if interleaved else np.concatenate((gate, up))
        assert np.array_equal(bits(banks.w13.dequantise(expert)), w13.copy().view(np.uint16))
        assert np.array_equal(bits(banks.w2.dequantise(expert)), down.copy().view(np.uint16))
        scale, bias = banks.w2.metadata(expert)
        assert torch.equal(scale, codes.down.scales)
        assert torch.equal(bias, metadata.bias(codes.down.scales, codes.down.zeros))


@given(
    st.integers(1, 4), st.sampled_from([8, 16, 32, 40, 64]), st.integers(1, 3), st.integers(1, 3), st.sampled_from(BOTH)
)
def test_any_geometry(experts: int, group: int, hidden: int, inner: int, kind: Metadata) -> None:
    """Sizes that do not fill the last tile hold the right weights too."""
    shape = BankShape(experts, hidden * group, inner * group)
    source = RandomSource(shape)
    banks = prepare(source, layout(kind, group, interleaved=False), shape, "cpu")
    for expert in range(experts):
        codes = source.read(expert, group)
        expected = np.concatenate((weights_of(codes.gate), weights_of(codes.up)))
        assert np.array_equal(bits(banks.w13.dequantise(expert)), expected.view(np.uint16))
        assert np.array_equal(bits(banks.w2.dequantise(expert)), weights_of(codes.down).copy().view(np.uint16))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("batched", [True, False])
def test_banks_take_what_the_shape_says(kind: Metadata, batched: bool) -> None:
    """Whole tiles cost exactly the bytes that a plan announces."""
    shape = BankShape(2, 64, 96)
    banks = allocate(layout(kind, batched=batched), shape, "cpu")
    assert banks.nbytes == shape.weight_bytes + shape.metadata_bytes(kind, 32)


def test_filling_writes_in_place() -> None:
    """The same memory before and after: kernels may hold its address."""
    shape = BankShape(2, 64, 32)
    banks = allocate(layout(), shape, "cpu")
    before = [tensor.data_ptr() for bank in (banks.w13, banks.w2) for tensor in (*bank.weights, *bank.groups)]
    banks.fill(1, RandomSource(shape).read(1, 32))
    assert before == [tensor.data_ptr() for bank in (banks.w13, banks.w2) for tensor in (*bank.weights, *bank.groups)]


def test_unfilled_banks_refuse_to_be_used() -> None:
    """The experts that never arrived are named."""
    shape = BankShape(4, 64, 32)
    banks = allocate(layout(), shape, "cpu")
    for expert in (0, 2):
        banks.fill(expert, RandomSource(shape).read(expert, 32))
    assert not banks.complete
    with pytest.raises(BackendError, match="experts 1, 3 of 4"):
        banks.require_complete()
    for expert in (3, 1):
        banks.fill(expert, RandomSource(shape).read(expert, 32))
    assert banks.complete
    banks.require_complete()


def test_an_expert_that_fails_to_fill_is_not_filled() -> None:
    """Codes of another shape are refused and leave the expert unfilled."""
    shape = BankShape(1, 64, 32)
    banks = allocate(layout(), shape, "cpu")
    good = RandomSource(shape).read(0, 32)
    for bad, named in (
        (ExpertCodes(good.gate, good.up, good.up), "down"),
        (ExpertCodes(good.gate, Codes(good.up.codes, good.up.zeros, good.up.scales.float()), good.down), "float32"),
        (ExpertCodes(Codes(good.gate.codes, good.gate.zeros[:1], good.gate.scales), good.up, good.down), "zeros"),
    ):
        with pytest.raises(BackendError, match=named):
            banks.fill(0, bad)
    with pytest.raises(BackendError, match="expert 1"):
        banks.fill(1, good)
    assert banks.filled == set()


def test_banks_that_cannot_be_are_refused() -> None:
    """Another order, a group that does not divide K, K without whole words, too few experts."""
    with pytest.raises(BackendError, match="octet"):
        allocate(BankLayout("octet", Metadata.FOUR_BYTE, 32, True, True), BankShape(1, 64, 64), "cpu")
    with pytest.raises(BackendError, match="K = 64"):
        allocate(layout(group=48), BankShape(1, 64, 96), "cpu")
    with pytest.raises(BackendError, match="K = 60"):
        allocate(layout(group=12), BankShape(1, 60, 96), "cpu")
    with pytest.raises(BackendError, match="2 experts"):
        prepare(RandomSource(BankShape(2, 64, 64)), layout(), BankShape(3, 64, 64), "cpu")


def test_progress_counts_experts() -> None:
    """After every expert, up to all of them."""
    seen: list[tuple[int, int]] = []
    shape = BankShape(3, 64, 32)
    prepare(RandomSource(shape), layout(), shape, "cpu", lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
