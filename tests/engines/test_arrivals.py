"""Tensors that an engine's loader brings: checked, cut for a rank, missed by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sm70_moe.engines.arrivals import Arrivals, ArrivedSource, Stacks
from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.decoding import encode
from sm70_moe.numbers.formats import AWQ, COMPRESSED, FORMATS, GPTQ_V1, Format

NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
HIDDEN, INTERMEDIATE, EXPERTS, GROUP = 128, 320, 4, 64


def facts(form: Format, **changes: object) -> LayerFacts:
    """TP 2 leaves 160 rows of W2 to a rank, which cut a group of 64."""
    known: dict[str, object] = {
        "layer": "layers.0.experts",
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "experts": EXPERTS,
        "top_k": 2,
        "format": form.name,
        "packing": form.packing,
        "bits": 4,
        "zero_point": True,
        "checkpoint_group": GROUP,
        "tensor_parallel": 2,
        "tensor_rank": 0,
    }
    return LayerFacts(**{**known, **changes})  # type: ignore[arg-type]  # a table of keywords


def matrix(seed: int, rows: int, columns: int) -> Codes:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=random)
    zeros = torch.randint(0, 16, (rows // GROUP, columns), dtype=torch.uint8, generator=random)
    return Codes(codes, zeros, torch.randn(rows // GROUP, columns, generator=random).to(torch.float16))


def whole(expert: int, name: str) -> Codes:
    rows, columns = (INTERMEDIATE, HIDDEN) if name == "down" else (HIDDEN, INTERMEDIATE)
    return matrix(100 * expert + len(name), rows, columns)


def stored(form: Format, expert: int, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    codes = whole(expert, name)
    yield from encode(form, codes).items()
    rows, columns = codes.codes.shape
    if form.sizes is not None:
        yield form.sizes.kind, torch.tensor([columns, rows])
    if form is GPTQ_V1:
        yield "g_idx", torch.arange(rows, dtype=torch.int32) // GROUP


def load(form: Format, arrivals: Arrivals, skip: tuple[int, str, str] | None = None) -> Stacks:
    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for expert in range(EXPERTS):
        for name in NAMES:
            for kind, tensor in stored(form, expert, name):
                if (expert, name, kind) == skip:
                    continue
                cut = arrivals.take(expert, name, kind, tensor)
                if cut is not None and kind in (form.codes.kind, form.zeros.kind, form.scales.kind):
                    parts.setdefault((name, kind), []).append(cut)
    return {key: torch.stack(found) for key, found in parts.items()}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.packing)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_its_rows_and_columns_where_a_cut_falls_into_a_group(form, rank):
    """Groups of 64 are read as groups of 32, from the rank's own first row (CONTRACT 6)."""
    arrivals = Arrivals(facts(form, tensor_rank=rank), NAMES)
    source = ArrivedSource(arrivals, load(form, arrivals))
    arrivals.require_complete()
    own = slice(160 * rank, 160 * (rank + 1))
    groups = [row // GROUP for row in range(160 * rank, 160 * (rank + 1), 32)]
    for expert in range(EXPERTS):
        found, up, down = source.read(expert, 32), whole(expert, "up"), whole(expert, "down")
        assert torch.equal(found.up.codes, up.codes[:, own])
        assert torch.equal(found.up.zeros, up.zeros[:, own].repeat_interleave(2, 0))
        assert torch.equal(found.down.codes, down.codes[own])
        assert torch.equal(found.down.zeros, down.zeros[groups])
        assert torch.equal(found.down.scales, down.scales[groups])
        assert torch.equal(found.gate.codes, whole(expert, "gate").codes[:, own])


def test_an_expert_parallel_rank_takes_its_own_experts():
    """Of 4 experts over 2 ranks, rank 1 has 2 and 3; the others come and are passed by."""
    arrivals = Arrivals(facts(AWQ, tensor_parallel=1, expert_parallel=2, expert_rank=1), NAMES)
    source = ArrivedSource(arrivals, load(AWQ, arrivals))
    arrivals.require_complete()
    assert source.experts == 2
    assert torch.equal(source.read(0, GROUP).down.codes, whole(2, "down").codes)


def test_a_tensor_that_never_came_is_named():
    """One of 36."""
    arrivals = Arrivals(facts(AWQ), NAMES)
    load(AWQ, arrivals, skip=(2, "up", "scales"))
    assert list(arrivals.missing()) == ["layers.0.experts.2.up_proj.scales"]
    with pytest.raises(CheckpointError, match=r"1 tensors did not come.*layers\.0\.experts\.2\.up_proj\.scales"):
        arrivals.require_complete()


def test_nothing_at_all_is_missed_too():
    """A layer of which no tensor came lacks every one."""
    assert len(list(Arrivals(facts(AWQ), NAMES).missing())) == EXPERTS * 3 * 3


def test_zeros_that_only_some_experts_have_are_missed():
    """A symmetric file may leave them out, but not here and there."""
    arrivals = Arrivals(facts(AWQ, zero_point=False), NAMES)
    load(AWQ, arrivals, skip=(1, "down", "qzeros"))
    assert list(arrivals.missing()) == ["layers.0.experts.1.down_proj.qzeros"]


def test_symmetric_files_without_zeros_are_complete():
    """Their zeros are all 8."""
    arrivals = Arrivals(facts(COMPRESSED, zero_point=False), NAMES)
    stacks = {key: found for key, found in load(COMPRESSED, arrivals).items() if key[1] != "weight_zero_point"}
    assert ArrivedSource(arrivals, stacks).read(0, 32).up.zeros.unique().tolist() == [8]


@pytest.mark.parametrize(
    ("kind", "tensor", "told"),
    [
        ("scales", torch.ones(1, INTERMEDIATE, dtype=torch.float16), r"\[1, 320\]; accepted is .* \[2, 320\]"),
        ("scales", torch.ones(2, INTERMEDIATE), "float32"),
        ("qweight", torch.zeros(HIDDEN, INTERMEDIATE // 8, dtype=torch.int64), "int64"),
        ("scales", torch.full((2, INTERMEDIATE), 1e-8, dtype=torch.bfloat16), "too small for FP16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(kind, tensor, told):
    """Before anything is copied."""
    arrivals = Arrivals(facts(AWQ), NAMES)
    with pytest.raises(CheckpointError, match=rf"layers\.0\.experts\.1\.up_proj\.{kind}.*{told}"):
        arrivals.take(1, "up", kind, tensor)


def test_a_second_tensor_of_a_name_is_refused():
    """Two files that hold one tensor: the host would keep the last one."""
    arrivals = Arrivals(facts(AWQ), NAMES)
    arrivals.take(0, "up", "scales", torch.ones(2, INTERMEDIATE, dtype=torch.float16))
    with pytest.raises(CheckpointError, match="came twice"):
        arrivals.take(0, "up", "scales", torch.ones(2, INTERMEDIATE, dtype=torch.float16))


def test_permuted_rows_are_refused():
    """GPTQ's act-order, whatever the config says."""
    arrivals = Arrivals(facts(GPTQ_V1), NAMES)
    with pytest.raises(CheckpointError, match="permuted"):
        arrivals.take(0, "up", "g_idx", torch.arange(HIDDEN, dtype=torch.int32).flip(0) // GROUP)


def test_experts_of_another_rank_cannot_be_read():
    """Numbers are the rank's own."""
    arrivals = Arrivals(facts(AWQ), NAMES)
    with pytest.raises(BackendError, match="accepted are 0 to 3"):
        ArrivedSource(arrivals, {}).read(4, 32)


def test_a_format_that_cannot_be_read_is_refused():
    """Admission says so first; without it there would be nothing to check against."""
    with pytest.raises(CheckpointError, match="gemv"):
        Arrivals(facts(AWQ, packing="gemv"), NAMES)
