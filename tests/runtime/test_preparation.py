"""Banks of a layer: from the weights or out of the cache, and the weights let go once they are there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.errors import CheckpointError
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.facts import LayerFacts
from sm70_moe.numbers.codes import ExpertCodes
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.layer import MoELayer, local_ids
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import fake_machine, settings

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"


class Watched:
    """A source that counts reads and notes its release; `fault` is raised for the last expert."""

    def __init__(self, source: CheckpointSource, fault: Exception | None = None) -> None:
        self.source, self.fault = source, fault
        self.reads = self.released = 0

    @property
    def experts(self) -> int:
        return self.source.experts

    @property
    def digest(self) -> str:
        return self.source.digest

    def read(self, expert: int, group: int) -> ExpertCodes:
        self.reads += 1
        if self.fault is not None and expert == self.experts - 1:
            raise self.fault
        return self.source.read(expert, group)

    def release(self) -> None:
        self.released += 1


def facts_of(folder: Path = TINY, layer: int = 0, **ranks: Any) -> tuple[LayerFacts, CheckpointSource]:
    checkpoint = Checkpoint.open(folder)
    found = checkpoint.layer(layer)
    ranks = {"tensor_parallel": 2, "tensor_rank": 0, "device": "cuda:0", **ranks}
    facts = checkpoint.facts(found, **ranks)
    return facts, CheckpointSource(checkpoint, found, facts)


def call(experts: int = 16, top_k: int = 4, hidden: int = 256) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(9, hidden, generator=source).half()
    weights, ids = torch.rand(9, experts, generator=source).softmax(1).topk(top_k)
    return x, ids, weights


def build(source: Watched, facts: LayerFacts, cache: Path | None = None) -> tuple[MoELayer, list[dict[str, Any]]]:
    """A layer by a service of its own, and the events about the cache."""
    variables = {} if cache is None else {"SM70_MOE_CACHE": str(cache)}
    with capture_logs() as events:
        service = AdmissionService(settings(SM70_MOE_PROOF="0", **variables), machine=fake_machine())
        layer = service.layer(facts, source, device="cpu")
    return layer, [dict(event) for event in events if event["event"] == "moe cache"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_cache_takes_the_place_of_the_weights(tmp_path: Path) -> None:
    """The second time nothing is read, the result has the same bits, and both times the source is released."""
    facts, source = facts_of()
    first, second = Watched(source), Watched(source)
    made, told = build(first, facts, tmp_path / "cache")
    assert (first.reads, first.released, told) == (16, 1, [])
    kept, told = build(second, facts, tmp_path / "cache")
    assert (second.reads, second.released, told) == (0, 1, [])
    assert torch.equal(made(*call()), kept(*call()))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_ranks_and_layers_have_files_of_their_own(tmp_path: Path) -> None:
    """Nobody gets the banks of another rank, layer or layout."""
    for ranks in ({"tensor_rank": 0}, {"tensor_rank": 1}, {"layer": 1}, {"expert_parallel": 2, "expert_rank": 1}):
        facts, source = facts_of(**ranks)
        watched = Watched(source)
        build(watched, facts, tmp_path)
        assert watched.reads == source.experts
    assert len(list(tmp_path.iterdir())) == 4


def test_a_damaged_file_is_one_warning_and_made_anew(tmp_path: Path) -> None:
    """Ignored, told once with file and reason, replaced; then all is quiet."""
    facts, source = facts_of()
    made, _ = build(Watched(source), facts, tmp_path)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 64
    path.write_bytes(content)
    watched = Watched(source)
    again, told = build(watched, facts, tmp_path)
    assert [(event["log_level"], event["file"]) for event in told] == [("warning", str(path))]
    assert "checksum" in told[0]["text"]
    assert watched.reads == 16
    assert torch.equal(made(*call()), again(*call()))
    assert build(Watched(source), facts, tmp_path)[1] == []


def test_changed_weights_make_the_file_stale(copy: Path, tmp_path: Path) -> None:
    """A checkpoint file with another time: one warning that says so, and the new weights are used."""
    facts, source = facts_of(copy)
    build(Watched(source), facts, tmp_path / "cache")
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes())
    facts, source = facts_of(copy)
    watched = Watched(source)
    _, told = build(watched, facts, tmp_path / "cache")
    assert len(told) == 1
    assert "source is" in told[0]["text"]
    assert watched.reads == 16


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """A file where the folder should be: the layer runs, one warning."""
    (tmp_path / "file").write_text("")
    facts, source = facts_of()
    layer, told = build(Watched(source), facts, tmp_path / "file")
    assert layer(*call()).isfinite().all()
    assert len(told) == 1
    assert "not written" in told[0]["text"]


def test_weights_without_an_identity_are_not_kept(tmp_path: Path) -> None:
    """An engine's own tensors: banks are made, no file is written, nothing is said."""
    facts, source = facts_of()

    class Anonymous:
        experts = source.experts

        def read(self, expert: int, group: int) -> ExpertCodes:
            return source.read(expert, group)

    service = AdmissionService(settings(SM70_MOE_CACHE=str(tmp_path / "cache")), machine=fake_machine())
    with capture_logs() as events:
        service.layer(facts, Anonymous(), device="cpu")
    assert not [event for event in events if event["event"] == "moe cache"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("cached", [True, False])
def test_a_failed_layer_leaves_its_source_intact(tmp_path: Path, cached: bool) -> None:
    """The error names the tensor and the expert; nothing is released or written, and it can be tried again."""
    facts, source = facts_of()
    watched = Watched(source, CheckpointError("tensor 15.up_proj.qzeros: changed"))
    cache = tmp_path / "cache" if cached else None
    with pytest.raises(CheckpointError, match=r"15\.up_proj\.qzeros") as error:
        build(watched, facts, cache)
    assert error.value.__notes__ == ["while reading expert 15 of 16"]
    assert watched.released == 0
    assert not (tmp_path / "cache").exists()
    watched.fault = None
    layer, _ = build(watched, facts, cache)
    assert watched.released == 1
    assert layer.banks.complete


def test_progress_of_a_service(tmp_path: Path) -> None:
    """Experts done and of all, for weights and for a cached layer alike."""
    facts, source = facts_of()
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        service = AdmissionService(settings(SM70_MOE_CACHE=str(tmp_path)), machine=fake_machine())
        with capture_logs():
            service.layer(facts, source, device="cpu", progress=lambda done, total: seen.append((done, total)))
    first, second = seen[: seen.index((16, 16)) + 1], seen[seen.index((16, 16)) + 1 :]
    assert first == sorted(first)
    assert second == [(n, 16) for n in range(1, 17)]


@pytest.mark.parametrize(("experts", "ranks"), [(16, 2), (16, 3), (7, 4), (5, 8)])
def test_expert_parallel_ranks_add_up(experts: int, ranks: int) -> None:
    """Each rank computes what its own experts contribute, also where ranks hold unequally many.

    In FP32 nothing is rounded to the activation's dtype, so the sum over the ranks is the whole
    layer's result but for the order of sums.
    """
    layer = SyntheticLayer(experts, 64, 64, 32)
    base = LayerFacts(
        layer="layer", index=0, hidden=64, intermediate=64, experts=experts, top_k=3, format="awq", packing="gemm",
        bits=4, zero_point=True, checkpoint_group=32, activation="silu", gated=True, bias=False,
        router_weight_on_input=False, activations="float32", tensor_parallel=1, tensor_rank=0, expert_parallel=1,
        expert_rank=0, device="cpu",
    )  # fmt: skip

    class Part:
        def __init__(self, first: int, count: int) -> None:
            self.first, self.experts = first, count

        def read(self, expert: int, group: int) -> ExpertCodes:
            return layer.read(self.first + expert, group)

    def run(facts: LayerFacts, first: int, count: int) -> torch.Tensor:
        with capture_logs():
            made = AdmissionService(settings(), machine=fake_machine(None)).layer(facts, Part(first, count))
        x, ids, weights = call(experts, 3, 64)
        ids[0] = torch.tensor([experts, -1, 2**40])
        return made(x.float(), ids, weights)

    whole = run(base, 0, experts)
    counts = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    parts = [
        run(replace(base, expert_parallel=ranks, expert_rank=rank), sum(counts[:rank]), counts[rank])
        for rank in range(ranks)
    ]
    assert torch.equal(whole[0], torch.zeros(64))
    assert all(torch.equal(part[0], whole[0]) for part in parts)
    assert torch.allclose(torch.stack(parts).sum(0), whole, rtol=1e-5, atol=1e-6)
    assert sum(bool((part != 0).any()) for part in parts) > 1


def test_local_ids() -> None:
    """Rank 1 of 3 over 16 experts holds 6 to 10: those become 0 to 4, all others are invalid, -1 and beyond too."""
    ids = torch.tensor([[5, 6, 10, 11, 0, 15], [-1, 16, 2**31 - 1, -(2**31), 7, 8]], dtype=torch.int32)
    found = local_ids(ids, 6)
    assert found.dtype == torch.int32
    assert [[n if 0 <= n < 5 else None for n in row] for row in found.tolist()] == [
        [None, 0, 4, None, None, None],
        [None, None, None, None, 1, 2],
    ]
    assert local_ids(ids, 0) is ids
