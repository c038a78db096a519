"""What sources offer beyond codes: row words, reading ahead, an identity, letting go."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.numbers.codes import Codes
from sm70_moe.numbers.decoding import decode, decode_rows, encode
from sm70_moe.numbers.formats import FORMATS, Format
from sm70_moe.numbers.rows import ExpertRows, Rows
from sm70_moe.reading.offers import (
    BatchSource,
    Fetching,
    Identified,
    Releasable,
    RowSource,
    fetch,
    read_batch,
    read_rows,
    release,
)
from sm70_moe.reading.source import CheckpointSource, TensorSource


def equal(one: Rows, other: Rows) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("words", "zeros", "scales"))


def source_of(folder: Path, layer: int = 0, **ranks: int) -> CheckpointSource:
    checkpoint = Checkpoint.open(folder)
    found = checkpoint.layer(layer)
    facts = checkpoint.facts(found, **{"tensor_parallel": 1, "tensor_rank": 0, **ranks}, device="cpu")
    return CheckpointSource(checkpoint, found, facts)


def engine(tiny: Path) -> TensorSource:
    """Both experts' worth of a layer in the form that an engine holds it."""
    arrays, prefix = load_file(tiny / "model.safetensors"), "model.layers.0.mlp.experts"
    held: dict[str, Any] = {}
    for kind in ("qweight", "qzeros", "scales"):
        part = {m: [arrays[f"{prefix}.{e}.{m}_proj.{kind}"] for e in range(2)] for m in ("gate", "up", "down")}
        held[f"w13_{kind}"] = [torch.cat(pair, dim=1) for pair in zip(part["gate"], part["up"], strict=True)]
        held[f"w2_{kind}"] = part["down"]
    return TensorSource(**held, group=32)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name}-{form.packing}")
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1), st.booleans())
def test_row_words_of_every_format(form: Format, groups: int, octets: int, seed: int, repeat: bool) -> None:
    """The words that packing the decoded codes gives, with the same zeros and scales."""
    rng = np.random.default_rng(seed)
    shape = (groups, 8 * octets)
    codes = Codes(
        torch.from_numpy(rng.integers(0, 16, (32 * groups, 8 * octets), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 16, shape, dtype=np.uint8)),
        torch.from_numpy(rng.uniform(-1, 1, shape).astype(np.float16)),
    )
    tensors = encode(form, codes)
    chosen = tuple(number // 2 for number in range(groups)) if repeat else tuple(range(groups))
    assert equal(decode_rows(form, tensors, chosen), Rows.of(decode(form, tensors, chosen)))


def test_both_sources_give_row_words(tiny: Path) -> None:
    """From files, for each rank, and from an engine's tensors: what packing their codes gives."""
    sources = [source_of(tiny, tensor_parallel=2, tensor_rank=rank) for rank in (0, 1)]
    for source in (*sources, engine(tiny)):
        assert isinstance(source, RowSource)
        for expert in range(2):
            found, packed = source.read_rows(expert, 32), ExpertRows.of(source.read(expert, 32))
            assert all(equal(getattr(found, m), getattr(packed, m)) for m in ("gate", "up", "down"))
            assert all(equal(getattr(read_rows(source, expert, 32), m), getattr(found, m)) for m in ("gate", "down"))


def test_a_batch_is_its_experts(tiny: Path) -> None:
    """Experts 3 to 7 at once, by files and by a source that only knows single ones."""
    source = source_of(tiny, tensor_parallel=2, tensor_rank=1)
    assert isinstance(source, BatchSource)
    for reader, batch in ((source, range(3, 8)), (engine(tiny), range(2))):
        found = read_batch(reader, batch, 32)
        for place, expert in enumerate(batch):
            single = read_rows(reader, expert, 32)
            one = found.of_expert(place)
            assert all(equal(getattr(one, m), getattr(single, m)) for m in ("gate", "up", "down"))


def test_reading_ahead_changes_nothing_and_raises_nothing(tiny: Path, tmp_path: Path) -> None:
    """Experts beyond the last are left out; a file that is gone is `read`'s to tell."""
    shutil.copytree(tiny, tmp_path / "copy")
    source = source_of(tmp_path / "copy")
    assert isinstance(source, Fetching)
    fetch(source, range(2))
    fetch(source, range(12, 99))
    fetch(source, range(99, 120))
    (tmp_path / "copy" / "model.safetensors").unlink()
    fetch(source, range(1))
    with pytest.raises(CheckpointError, match=r"0\.gate_proj\.qweight.*model.safetensors"):
        source.read_rows(0, 32)


def test_a_file_that_was_cut_is_told_with_its_tensor(tiny: Path, tmp_path: Path) -> None:
    """A file that is shorter than when its header was read; whole again, it is opened again."""
    shutil.copytree(tiny, tmp_path / "copy")
    source = source_of(tmp_path / "copy")
    path = tmp_path / "copy" / "model.safetensors"
    whole = path.read_bytes()
    os.truncate(path, len(whole) // 2)
    with pytest.raises(CheckpointError, match=r"gate_proj.*changed since its header was read"):
        source.read_rows(0, 32)
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="changed since its header was read"):
        source.read_rows(0, 32)
    assert source_of(tmp_path / "copy").read_rows(0, 32).gate.words.shape == (32, 128)


def test_identity_follows_the_weights(tiny: Path, tmp_path: Path) -> None:
    """Equal for every rank; different for other layers, contents and times, and for every copy."""
    shutil.copytree(tiny, tmp_path / "copy")
    original, copy = source_of(tiny), source_of(tmp_path / "copy")
    assert isinstance(original, Identified)
    assert original.digest == source_of(tiny, tensor_parallel=2, tensor_rank=1).digest
    assert original.digest not in (copy.digest, source_of(tiny, 1).digest)
    path, before = tmp_path / "copy" / "model.safetensors", copy.digest
    path.write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="changed since its header was read"):
        _ = copy.digest
    assert source_of(tmp_path / "copy").digest != before
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        _ = copy.digest


def test_an_engines_tensors_have_no_identity(tiny: Path) -> None:
    """Nobody can tell what they are but by reading them, so their banks are not kept."""
    assert not isinstance(engine(tiny), Identified)


def test_released_tensors_are_gone(tiny: Path) -> None:
    """The source drops them; reading it afterwards says why."""
    source = engine(tiny)
    assert isinstance(source, Releasable)
    release(source)
    assert (source.experts, len(source.w13_qweight), source.w2_qzeros) == (0, 0, None)
    with pytest.raises(BackendError, match="released"):
        source.read(0, 32)
    files = source_of(tiny)
    release(files)
    assert files.read(0, 32)


def test_a_source_of_another_layer_is_refused(tiny: Path) -> None:
    """Facts of a layer with other sizes."""
    checkpoint = Checkpoint.open(tiny)
    found = checkpoint.layer(0)
    facts = checkpoint.facts(found, tensor_parallel=1, tensor_rank=0, device="cpu")
    with pytest.raises(BackendError, match="another layer"):
        CheckpointSource(checkpoint, found, replace(facts, experts=8))
