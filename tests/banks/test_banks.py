"""Prepared banks: order, metadata, arithmetic and completeness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.banks import metadata, octets, tiles
from sm70_moe.banks.banks import Banks, allocate, convert
from sm70_moe.banks.orders import PACKINGS
from sm70_moe.banks.packing import fused as fused_weights
from sm70_moe.errors import BackendError
from sm70_moe.layout import ORDERS, BankLayout, BankShape, Metadata
from sm70_moe.numbers.codes import Codes, ExpertCodes
from sm70_moe.numbers.rowwords import row_words
from sm70_moe.reading.loading import prepare

EVERY = tuple(Metadata)
ORDER_NAMES = ("tile32x8", "octet32")


def layout(
    kind: Metadata = Metadata.FOUR_BYTE,
    group: int = 32,
    interleaved: bool = True,
    batched: bool = True,
    order: str = "tile32x8",
) -> BankLayout:
    return BankLayout(order, kind, group, interleaved, batched)


def pack(order: str, codes: torch.Tensor) -> torch.Tensor:
    """The words of one matrix, as a plane has them."""
    rows, columns = codes.shape
    (shape,) = (p.shape for p in ORDERS[order].planes(Metadata.FOUR_BYTE, rows, columns, rows) if p.name == "words")
    plane = torch.full(shape, -1, dtype=torch.int32)
    PACKINGS[order].put(row_words(codes), plane, 0, 1)
    return plane


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
    words = pack("tile32x8", codes).flatten()
    assert words.nonzero().flatten().tolist() == [20614]
    assert words[20614].item() == 15 << (4 * 5)


@pytest.mark.parametrize(("row", "nibble"), list(enumerate((0, 4, 1, 5, 2, 6, 3, 7))))
def test_every_row_of_a_word_has_its_nibble(row: int, nibble: int) -> None:
    """k' = k mod 8 sits in nibble ((k' & 1) << 2) + (k' >> 1)."""
    codes = torch.zeros(8, 32, dtype=torch.uint8)
    codes[row, 3] = 9
    assert pack("tile32x8", codes).view(torch.uint8).sum().item() in (9, 9 << 4)
    assert (int(pack("tile32x8", codes)[0, 0, 3].item()) >> (4 * nibble)) & 15 == 9


@given(st.integers(1, 5), st.integers(1, 80), st.integers(0, 2**32 - 1))
def test_packing_and_unpacking_are_inverse(words: int, columns: int, seed: int) -> None:
    """For any geometry, also one that does not fill its last tile."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 16, (8 * words, columns), dtype=np.uint8))
    packed = pack("tile32x8", codes)
    assert packed.shape == (-(-columns // 32), words, 32)
    assert torch.equal(tiles.PACKING.unpack(packed, columns), codes.t().short())


def test_the_tables_of_orders_agree() -> None:
    """Every order has a geometry and a packing under its own name."""
    assert tuple(ORDERS) == tuple(PACKINGS) == ORDER_NAMES
    assert all(PACKINGS[name].order is order for name, order in ORDERS.items())


def test_an_octets_words_and_nibbles() -> None:
    """K = 2560, N = 320: code (35, 70) is octet 8, block 1, column 6, word 0, nibble 5."""
    codes = torch.zeros(2560, 320, dtype=torch.uint8)
    codes[35, 70] = 15
    words = pack("octet32", codes)
    assert words.shape == (40, 80, 8, 4)
    assert words.nonzero().tolist() == [[8, 1, 6, 0]]
    assert words[8, 1, 6, 0].item() == 15 << (4 * 5)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_octets_pack_and_unpack(blocks: int, octet: int, seed: int) -> None:
    """Inverse for any geometry; 16 bytes in a row are 32 consecutive rows of one column."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 16, (32 * blocks, 8 * octet), dtype=np.uint8))
    words = pack("octet32", codes)
    assert words.shape == (octet, blocks, 8, 4)
    assert torch.equal(octets.PACKING.unpack(words, 8 * octet), codes.t().short())
    line = words[octet - 1, blocks - 1, 3].clone().view(1, 1, 1, 4).expand(1, 1, 8, 4)
    rows = codes[32 * blocks - 32 :, 8 * octet - 5].short()
    assert all(torch.equal(column, rows) for column in octets.PACKING.unpack(line, 8))


def test_the_contracts_metadata() -> None:
    """Scale 0x211F with zero 8: 0xAD1F211F in four bytes, 1F 21 08 in three, a nibble besides it in 2.5."""
    scale, zero = halves(0x211F).view(1, 1), torch.tensor([[8]], dtype=torch.uint8)
    (four,) = tiles.PACKING.encode(Metadata.FOUR_BYTE, scale, zero).values()
    (three,) = tiles.PACKING.encode(Metadata.THREE_BYTE, scale, zero).values()
    assert four.item() == 0xAD1F211F - 2**32
    assert three.tolist() == [[[0x1F, 0x21, 0x08]]]
    least = tiles.PACKING.encode(Metadata.TWO_AND_HALF_BYTE, scale, zero)
    assert {name: plane.tolist() for name, plane in least.items()} == {"scales": scale.tolist(), "zeros": [[8]]}


@pytest.mark.parametrize(
    ("kind", "name", "shape", "dtype"),
    [
        (Metadata.FOUR_BYTE, "metadata", (5, 2, 8), torch.int32),
        (Metadata.THREE_BYTE, "scales", (5, 2, 8), torch.float16),
        (Metadata.THREE_BYTE, "zeros", (5, 2, 8), torch.uint8),
        (Metadata.TWO_AND_HALF_BYTE, "scales", (5, 2, 8), torch.float16),
        (Metadata.TWO_AND_HALF_BYTE, "zeros", (5, 2, 1), torch.int32),
    ],
)
def test_groups_stand_beside_their_octet(kind: Metadata, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Group g of column 8o + c is (o, g, c); packed zeros have column c in nibble c."""
    scales = torch.arange(80).view(2, 40).half()
    zeros = (torch.arange(80).view(2, 40) % 16).byte()
    plane = octets.PACKING.encode(kind, scales, zeros)[name]
    assert (tuple(plane.shape), plane.dtype) == (shape, dtype)
    if name == "scales":
        assert plane[3, 1, 5].item() == 40 + 29
    elif name == "zeros":
        zero = (40 + 29) % 16
        found = plane[3, 1, 5].item() if kind is Metadata.THREE_BYTE else (int(plane[3, 1, 0].item()) >> 20) & 15
        assert found == zero
    else:
        assert plane[3, 1, 5].view(1).view(torch.float16)[0].item() == 40 + 29


def one_weight(q: int, zero: int, scale: int, kind: Metadata, order: str = "tile32x8") -> int:
    """Bits of one weight, through a whole bank."""
    matrix = Codes(
        torch.full((32, 32), q, dtype=torch.uint8),
        torch.full((1, 32), zero, dtype=torch.uint8),
        halves(scale).expand(1, 32).contiguous(),
    )
    wide = Codes(*(torch.cat([part, part], dim=1) for part in (matrix.codes, matrix.zeros, matrix.scales)))
    tall = Codes(*(torch.cat([part, part]) for part in (matrix.codes, matrix.zeros, matrix.scales)))
    banks = allocate(layout(kind, order=order), BankShape(1, 32, 64), "cpu")
    banks.fill(0, ExpertCodes(wide, wide, tall))
    found = np.unique(bits(banks.w13.dequantise(0)))
    assert np.array_equal(found, np.unique(bits(banks.w2.dequantise(0))))
    (value,) = found.tolist()
    return int(value)


@pytest.mark.parametrize("order", ORDER_NAMES)
@pytest.mark.parametrize("kind", EVERY)
def test_the_contracts_rounding(kind: Metadata, order: str) -> None:
    """A weight is a fused multiply-add and not the product of a difference."""
    assert one_weight(1, 3, 0x068E, kind, order) == 0x8A8D
    assert one_weight(3, 3, 0x211F, kind, order) == 0x0080


def test_every_code_and_zero_with_every_scale() -> None:
    """All 256 pairs with all 63,488 finite scales, subnormal and negative ones too, bit for bit.

    One column for each pair of scale and zero, 16 rows for the codes.
    """
    pattern = np.arange(65536, dtype=np.uint16).view(np.float16)
    scales = pattern[np.isfinite(pattern)]
    assert scales.size == 63488
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], scales.size, axis=1)
    words = pack("tile32x8", torch.from_numpy(codes))
    for zero in range(16):
        scale = torch.from_numpy(scales).view(1, -1)
        zeros = torch.full(scale.shape, zero, dtype=torch.uint8)
        with np.errstate(over="ignore"):
            expected = fused(codes, zeros.numpy(), scales)
        for kind in EVERY:
            planes = dict(tiles.PACKING.encode(kind, scale, zeros))
            found = fused_weights(tiles.PACKING.unpack(words, scales.size), *tiles.PACKING.groups(kind, planes))
            assert np.array_equal(bits(found), expected.T.copy().view(np.uint16)), (zero, kind)


@pytest.mark.parametrize("order", ORDER_NAMES)
def test_metadata_layouts_decode_to_the_same_bits(order: str) -> None:
    """Scale and bias of every finite scale and zero, signed zeros included."""
    pattern = np.arange(65536, dtype=np.uint16).view(np.float16)
    scale = torch.from_numpy(pattern[np.isfinite(pattern)]).expand(16, -1).contiguous()
    zero = torch.arange(16, dtype=torch.uint8).unsqueeze(1).expand_as(scale).contiguous()
    packing = PACKINGS[order]
    four, *others = (packing.groups(kind, packing.encode(kind, scale, zero)) for kind in EVERY)
    for other in others:
        for left, right in zip(four, other, strict=True):
            assert np.array_equal(bits(left), bits(right))
    assert np.array_equal(bits(four[0]), bits(scale))


@pytest.mark.parametrize("order", ORDER_NAMES)
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_layer_is_its_experts(kind: Metadata, interleaved: bool, batched: bool, order: str) -> None:
    """Each expert's weights come back; columns 2c and 2c + 1 are gate and up c, or gates come first."""
    shape = BankShape(3, 64, 32)
    source = RandomSource(shape)
    banks = prepare(source, layout(kind, 32, interleaved, batched, order), shape, "cpu")
    assert isinstance(banks.w13.planes["words"], torch.Tensor) is batched
    for expert in range(3):
        codes = source.read(expert, 32)
        gate, up, down = (weights_of(matrix) for matrix in (codes.gate, codes.up, codes.down))
        w13 = np.stack((gate, up), axis=1).reshape(64, 64) if interleaved else np.concatenate((gate, up))
        assert np.array_equal(bits(banks.w13.dequantise(expert)), w13.copy().view(np.uint16))
        assert np.array_equal(bits(banks.w2.dequantise(expert)), down.copy().view(np.uint16))
        scale, bias = banks.w2.metadata(expert)
        assert torch.equal(scale, codes.down.scales)
        assert torch.equal(bias, metadata.bias(codes.down.scales, codes.down.zeros))


SOME = st.integers(1, 3)


@given(st.integers(1, 4), st.sampled_from([8, 16, 32, 40, 64]), SOME, SOME, st.sampled_from(EVERY))
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


@pytest.mark.parametrize("order", ORDER_NAMES)
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("batched", [True, False])
def test_banks_take_what_the_shape_says(kind: Metadata, batched: bool, order: str) -> None:
    """Whole tiles cost exactly the bytes that a plan announces."""
    shape = BankShape(2, 128, 96)
    banks = allocate(layout(kind, batched=batched, order=order), shape, "cpu")
    assert banks.nbytes == shape.weight_bytes + shape.metadata_bytes(kind, 32)


@pytest.mark.parametrize(
    ("kind", "w13", "w2"), [("4-byte", 512_000, 256_000), ("3-byte", 486_400, 243_200), ("2.5-byte", 473_600, 236_800)]
)
@pytest.mark.parametrize("order", ORDER_NAMES)
def test_bytes_of_one_expert_of_the_first_contract(order: str, kind: str, w13: int, w2: int) -> None:
    """Hidden 2560, 160 columns a rank, group 32."""
    banks = allocate(layout(Metadata(kind), order=order), BankShape(1, 2560, 160), "cpu")
    assert (banks.w13.nbytes, banks.w2.nbytes) == (w13, w2)


@pytest.mark.parametrize("order", ORDER_NAMES)
@pytest.mark.parametrize("kind", EVERY)
def test_kernels_may_take_addresses(kind: Metadata, order: str) -> None:
    """Planes are contiguous from a multiple of 256; the experts of an octet bank from one of 16."""
    banks = allocate(layout(kind, order=order), BankShape(3, 128, 96), "cpu")
    for bank in (banks.w13, banks.w2):
        for plane in bank.tensors:
            assert plane.is_contiguous()
            assert plane.shape[0] == 3
            assert plane.data_ptr() % 256 == 0
            assert order != "octet32" or plane.stride(0) * plane.element_size() % 16 == 0


def test_filling_writes_in_place() -> None:
    """The same memory before and after: kernels may hold its address."""
    shape = BankShape(2, 64, 32)
    banks = allocate(layout(), shape, "cpu")
    before = [tensor.data_ptr() for bank in (banks.w13, banks.w2) for tensor in bank.tensors]
    banks.fill(1, RandomSource(shape).read(1, 32))
    assert before == [tensor.data_ptr() for bank in (banks.w13, banks.w2) for tensor in bank.tensors]


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


@pytest.mark.parametrize(
    ("sizes", "kind", "named"),
    [
        ((48, 64, 16), Metadata.FOUR_BYTE, "K = 48: accepted are multiples of the group, 16, and of 32"),
        ((32, 64, 64), Metadata.THREE_BYTE, "K = 32: accepted are multiples of the group, 64,"),
        ((32, 36, 32), Metadata.FOUR_BYTE, "N = 36: accepted are multiples of 8"),
        ((32, 8, 32), Metadata.TWO_AND_HALF_BYTE, "'zeros' has 4 bytes an expert"),
        ((32, 8, 32), Metadata.THREE_BYTE, "'zeros' has 8 bytes an expert"),
        ((64, 16, 32), Metadata.TWO_AND_HALF_BYTE, None),
    ],
)
def test_what_octets_do_not_hold(sizes: tuple[int, int, int], kind: Metadata, named: str | None) -> None:
    """K in blocks of 32 and whole groups, and records that 16-byte loads can read, each named.

    A whole layer's records always are: its K and its N are multiples of 32.
    """
    fault = ORDERS["octet32"].fault(kind, *sizes)
    assert fault is None if named is None else fault is not None and named in fault
    with pytest.raises(BackendError, match="order 'octet32' with K = 48"):
        allocate(layout(order="octet32", group=16), BankShape(1, 48, 32), "cpu")


def test_progress_counts_experts() -> None:
    """It grows up to all of them."""
    seen: list[tuple[int, int]] = []
    shape = BankShape(40, 64, 32)
    prepare(RandomSource(shape), layout(), shape, "cpu", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert len(seen) > 1
    assert seen[-1] == (40, 40)


def planes_of(banks: Banks) -> list[tuple[str, torch.Tensor]]:
    """Every plane of both banks, experts first."""
    return [
        (name, stack if isinstance(stack, torch.Tensor) else torch.stack(list(stack)))
        for bank in (banks.w13, banks.w2)
        for name, stack in bank.planes.items()
    ]


LAYOUTS = st.builds(
    layout,
    st.sampled_from(EVERY),
    st.just(32),
    st.booleans(),
    st.booleans(),
    st.sampled_from(ORDER_NAMES),
)


@given(LAYOUTS, LAYOUTS, SOME, SOME, SOME)
def test_conversion_is_a_bijection(first: BankLayout, other: BankLayout, experts: int, hidden: int, inner: int) -> None:
    """Between any two layouts: the bytes that preparing gives, and back to the bytes from before."""
    shape = BankShape(experts, 32 * hidden, 32 * inner)
    source = RandomSource(shape)
    banks = prepare(source, first, shape, "cpu", readers=1)
    there = convert(banks, other)
    for made, wanted in ((there, prepare(source, other, shape, "cpu", readers=1)), (convert(there, first), banks)):
        assert made.layout == wanted.layout
        assert made.complete
        for (name, found), (same, expected) in zip(planes_of(made), planes_of(wanted), strict=True):
            assert name == same
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_every_zero_of_every_scale_survives_four_bytes() -> None:
    """A bias gives back the zero, unless no weight could tell: a scale of 0, a bias that overflows."""
    pattern = np.arange(65536, dtype=np.uint16).view(np.float16)
    scale = torch.from_numpy(pattern[np.isfinite(pattern)]).expand(16, -1).contiguous()
    zero = torch.arange(16, dtype=torch.uint8).unsqueeze(1).expand_as(scale).contiguous()
    four = metadata.encode(Metadata.FOUR_BYTE, scale, zero, frozenset({"metadata"}))
    same, found = metadata.zeros_of(Metadata.FOUR_BYTE, four)
    assert np.array_equal(bits(same), bits(scale))
    told = (scale != 0) & metadata.bias(scale, zero).isfinite()
    assert torch.equal(found[told], zero[told])
    assert int(told.sum()) > 900_000
    again = metadata.encode(Metadata.FOUR_BYTE, scale, found, frozenset({"metadata"}))
    assert torch.equal(again["metadata"], four["metadata"])


def test_a_bias_of_no_zero_is_refused() -> None:
    """Four bytes that this package did not write: scale 1 with bias 0.5."""
    stored = torch.tensor([[0x38003C00]], dtype=torch.int32)
    with pytest.raises(BackendError, match=r"scale 1.0 with bias 0.5"):
        metadata.zeros_of(Metadata.FOUR_BYTE, {"metadata": stored})


def test_conversion_keeps_the_group() -> None:
    """Another group is not the same weights' layout; unfilled banks have nothing to convert."""
    shape = BankShape(1, 64, 64)
    with pytest.raises(BackendError, match="convert group 32"):
        convert(prepare(RandomSource(shape), layout(), shape, "cpu"), layout(group=64))
    with pytest.raises(BackendError, match="experts 0 of 1"):
        convert(allocate(layout(), shape, "cpu"), layout(order="octet32"))
