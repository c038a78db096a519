"""Stored words and codes, to the bit, for every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import CheckpointError
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.decoding import decode, encode, pack_part, unpack_part
from sm70_moe.numbers.formats import AWQ, COMPRESSED, FORMATS, GPTQ_V1, GPTQ_V2, Axis, Format, accepted, find
from sm70_moe.numbers.rowwords import unpack_rows
from sm70_moe.numbers.words import pack, unpack

EIGHT = torch.arange(8, dtype=torch.uint8)
FORM = st.sampled_from(FORMATS)


def word(value: int) -> torch.Tensor:
    """One INT32 word; values from 2^31 on are negative."""
    return torch.tensor([[value - 2**32 if value >= 2**31 else value]], dtype=torch.int32)


def unsigned(words: torch.Tensor) -> int:
    return int(words.item()) % 2**32


@pytest.mark.parametrize(
    ("form", "part", "expected"),
    [
        (AWQ, "codes", 0x75316420),
        (AWQ, "zeros", 0x75316420),
        (COMPRESSED, "codes", 0x76543210),
        (COMPRESSED, "zeros", 0x76543210),
        (GPTQ_V1, "codes", 0x76543210),
        (GPTQ_V1, "zeros", 0x6543_20FF),  # 0x76543210 - 0x11111111: the zero of 0 has borrowed
        (GPTQ_V2, "codes", 0x76543210),
        (GPTQ_V2, "zeros", 0x76543210),
    ],
    ids=lambda value: f"{value.name}-{value.packing}" if isinstance(value, Format) else None,
)
def test_numbers_in_order_give_the_formats_word(form: Format, part: str, expected: int) -> None:
    """0..7 along the dimension that is packed; nothing is added to zeros but by GPTQ's first version."""
    found = getattr(form, part)
    along_rows = found.dims[found.packed].axis is Axis.K
    values = EIGHT.view(8, 1) if along_rows else EIGHT.view(1, 8)
    assert unsigned(pack_part(found, values)) == expected
    assert torch.equal(unpack_part(found, word(expected)), values)


@pytest.mark.parametrize(("column", "nibble"), list(enumerate((0, 4, 1, 5, 2, 6, 3, 7))))
def test_every_awq_column_has_its_nibble(column: int, nibble: int) -> None:
    """A single 15 in one column lands in one nibble, for weights and for zeros, sign bit included."""
    values = torch.zeros(1, 8, dtype=torch.uint8)
    values[0, column] = 15
    for part in (AWQ.codes, AWQ.zeros):
        assert unsigned(pack_part(part, values)) == 15 << (4 * nibble)
        assert torch.equal(unpack_part(part, word(15 << (4 * nibble))), values)


def test_negative_words_do_not_leak_their_sign() -> None:
    """-1 is fifteen everywhere; the smallest INT32 is an 8 in the last place alone."""
    words = torch.tensor([[-1, -(2**31)]], dtype=torch.int32)
    for part in (AWQ.codes, AWQ.zeros, GPTQ_V2.zeros):
        assert unpack_part(part, words).tolist() == [[15] * 8 + [0] * 7 + [8]]
    assert unpack_part(GPTQ_V2.codes, words).t().tolist() == [[15] * 8, [0] * 7 + [8]]
    assert unpack_part(COMPRESSED.codes, words).t().tolist() == [[15] * 8 + [0] * 7 + [8]]


@pytest.mark.parametrize(
    ("stored", "zeros"),
    [
        (0x77777777, [8] * 8),  # what symmetric files hold
        (0x00000000, [1] * 8),
        (0xEEEEEEEF, [0] * 8),  # eight zeros of 0: 0 - 0x11111111 modulo 2^32
        (0xFFFFFFFF, [0, 1, 1, 1, 1, 1, 1, 1]),
        (0x0000000F, [0, 2, 1, 1, 1, 1, 1, 1]),  # a carry reaches the next column
        (0xF0000000, [1, 1, 1, 1, 1, 1, 1, 0]),  # and leaves the word at the top
        (0xEEEEEEEE, [15] * 8),
    ],
)
def test_gptq_v1_adds_to_the_whole_word(stored: int, zeros: list[int]) -> None:
    """With carries; every word stands for eight zeros in 0..15, and none for 16."""
    assert unpack_part(GPTQ_V1.zeros, word(stored)).tolist() == [zeros]
    assert unsigned(pack_part(GPTQ_V1.zeros, torch.tensor([zeros], dtype=torch.uint8))) == stored


def numbers(rng: np.random.Generator, k: int, n: int, groups: int) -> Codes:
    return Codes(
        torch.from_numpy(rng.integers(0, 16, (k, n), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 16, (groups, n), dtype=np.uint8)),
        torch.from_numpy(rng.standard_normal((groups, n)).astype(np.float16)),
    )


@given(FORM, st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_packing_and_unpacking_are_inverse(form: Format, rows: int, columns: int, groups: int, seed: int) -> None:
    """For any geometry of whole words, in every format, numbers come back as they were."""
    codes = numbers(np.random.default_rng(seed), 8 * rows * groups, 8 * columns, groups)
    found = decode(form, encode(form, codes), tuple(range(groups)))
    for name in ("codes", "zeros", "scales"):
        assert torch.equal(getattr(found, name), getattr(codes, name))


@given(FORM, st.sampled_from(["codes", "zeros"]), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_any_words_come_back(form: Format, part: str, rows: int, columns: int, seed: int) -> None:
    """Unpacking and packing are inverse that way round too: every bit of every word counts."""
    rng = np.random.default_rng(seed)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, columns), dtype=np.int32))
    found = getattr(form, part)
    assert torch.equal(pack_part(found, unpack_part(found, words)), words)


@given(FORM, st.integers(0, 2**32 - 1))
def test_a_part_of_the_words_is_a_part_of_the_numbers(form: Format, seed: int) -> None:
    """Cutting stored tensors at whole words and then unpacking gives what cutting the numbers gives."""
    rng = np.random.default_rng(seed)
    codes, (top, left) = numbers(rng, 64, 48, 4), rng.integers(0, 3, 2)
    spans = {Axis.K: range(16 * top, 64), Axis.GROUP: range(top, 4), Axis.N: range(8 * left, 48)}
    stored = encode(form, codes)
    cut = {}
    for part in (form.codes, form.zeros, form.scales):
        rows, columns = (slice(span.start, span.stop) for span in part.spans(spans))
        cut[part.kind] = stored[part.kind][rows, columns]
    found = decode(form, cut, tuple(range(4 - top)))
    assert torch.equal(found.codes, codes.codes[16 * top :, 8 * left :])
    assert torch.equal(found.zeros, codes.zeros[top:, 8 * left :])
    assert torch.equal(found.scales, codes.scales[top:, 8 * left :])


@pytest.mark.parametrize("form", [AWQ, COMPRESSED], ids=["awq", "compressed-tensors"])
def test_decode_repeats_groups_and_fills_in_symmetric_zeros(form: Format) -> None:
    """Rows of scales are taken by number; without zeros each is 8."""
    codes = Codes(
        torch.zeros(16, 8, dtype=torch.uint8),
        torch.zeros(2, 8, dtype=torch.uint8),
        torch.tensor([[1.0] * 8, [-2.0] * 8], dtype=torch.float16),
    )
    stored = encode(form, codes)
    del stored[form.zeros.kind]
    found = decode(form, stored, (0, 1, 1))
    assert found.scales[:, 0].tolist() == [1.0, -2.0, -2.0]
    assert found.zeros.tolist() == [[8] * 8] * 3


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name}-{form.packing}")
@pytest.mark.parametrize(("part", "dtype"), [("codes", "int64"), ("zeros", "uint8"), ("scales", "float32")])
def test_decode_refuses_another_dtype(form: Format, part: str, dtype: str) -> None:
    """The tensor is named, with the dtype it has."""
    stored = encode(form, numbers(np.random.default_rng(0), 16, 8, 2))
    kind = getattr(form, part).kind
    stored[kind] = stored[kind].to(getattr(torch, dtype))
    with pytest.raises(CheckpointError) as caught:
        decode(form, stored, (0, 1), "layer.0.")
    assert f"layer.0.{kind}" in str(caught.value)
    assert dtype in str(caught.value)


def test_formats_are_found_by_name_and_packing() -> None:
    """Nothing else is a format."""
    assert find("awq", "gemm") is AWQ
    assert find("gptq", "gptq_v2") is GPTQ_V2
    for name, packing in (("awq", "gemv"), ("awq", None), (None, "gemm"), ("gptq", "gptq, act-order")):
        assert find(name, packing) is None


@given(data=st.data(), shape=st.sampled_from([(3,), (5, 2), (2, 3, 4)]))
def test_few_words_and_many_are_taken_apart_alike(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Any dimension and order, negative words too; either way `pack` puts them together again."""
    order = tuple(data.draw(st.permutations(range(8))))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        few = unpack(words, order, dim)
        patch.setattr("sm70_moe.numbers.words.FEW", 0)
        many = unpack(words, order, dim)
    assert torch.equal(few, many)
    place = dim % len(shape)
    eights = few.reshape(*shape[: place + 1], 8, *shape[place + 1 :]).movedim(place + 1, -1)
    assert torch.equal(pack(eights, order), words)


def test_what_can_be_read_is_listed_for_messages() -> None:
    """Every format and packing, and the bits."""
    told = accepted()
    assert all(form.name in told and form.packing in told for form in FORMATS)
    assert told.endswith("4 bits")


def test_bf16_scales_are_decoded_as_fp16() -> None:
    """Whoever hands stored tensors over directly: exact values, and the tensor's name where one cannot be."""
    codes = numbers(np.random.default_rng(0), 16, 8, 2)
    stored = encode(AWQ, codes)
    stored["scales"] = torch.full((2, 8), 0.75, dtype=torch.bfloat16)
    assert decode(AWQ, stored, (0, 1)).scales.tolist() == [[0.75] * 8] * 2
    stored["scales"][1, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"^layer\.0\.scales: scale nan of group 1 of rows, column 3"):
        decode(AWQ, stored, (0, 1), "layer.0.")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name}-{form.packing}")
def test_which_tensors_a_matrix_must_have(form: Format) -> None:
    """Codes and scales always; zeros unless the file is symmetric; row groups where they are; sizes by expert."""

    def kinds(zero_point: bool | None = True, present: frozenset[str] = frozenset(), stacked: bool = False) -> set[str]:
        return {part.kind for part in form.parts(present, zero_point, stacked)}

    needed = {form.codes.kind, form.scales.kind}
    sizes = set() if form.sizes is None else {form.sizes.kind}
    zeros, index = form.zeros.kind, form.index.kind if form.index else None
    assert kinds() == needed | {zeros} | sizes
    assert kinds(None) == needed | {zeros} | sizes
    assert kinds(False) == needed | sizes | ({zeros} if form.zeros_always else set())
    assert kinds(False, frozenset({zeros})) == needed | sizes | {zeros}
    assert kinds(stacked=True) == needed | {zeros}
    assert kinds(present=frozenset(sizes), stacked=True) == needed | {zeros} | sizes
    if index is not None:
        assert kinds(present=frozenset({index})) == needed | {zeros, index} | sizes


def test_results_stay_on_the_device_of_the_words() -> None:
    """Nothing is made on the host on the way; `meta` is a device that every machine has."""
    values = torch.empty(6, 8, dtype=torch.uint8, device="meta")
    words = pack(values, (0, 4, 1, 5, 2, 6, 3, 7))
    assert (words.device.type, words.dtype, words.shape) == ("meta", torch.int32, (6,))
    pairs = unpack_rows(torch.empty(3, 2, dtype=torch.int32, device="meta"))
    assert (pairs.device.type, pairs.dtype, pairs.shape) == ("meta", torch.int16, (3, 16))
