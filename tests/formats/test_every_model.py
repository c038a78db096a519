"""Every geometry of models.csv at TP 1, 2, 4 and 8, scaled down to what decides how it divides."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sm70_moe import Settings, admit, load_policy, probe
from sm70_moe.admission.admit import Admission
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.evidence.oracle import reference_of
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import Grouping, group_layer
from sm70_moe.kernels.call import Call
from sm70_moe.numbers.codes import Codes
from sm70_moe.plan.memory import backend, bank_shape
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.reference.arithmetic import Answer, combine
from sm70_moe.reference.bounds import final_bound, gamma, judge_w13
from sm70_moe.reference.rounding import FORMATS, Floats, widen

Array = np.ndarray[Any, Any]

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cut:
    """What a geometry has in common with all that divide like it; `plans` are those of models.csv by TP."""

    hidden: int
    intermediate: int
    group: int
    plans: tuple[str, ...]


def scaled(size: int, most: int, odd: int) -> int:
    """A small number with the same powers of two, up to 2**most, times `odd` unless the size is such a power."""
    powers = (size & -size).bit_length() - 1
    return 2 ** min(powers, most) * (1 if size == 2**powers else odd)


def cuts() -> list[Cut]:
    with (Path(__file__).parents[1] / "data" / "models.csv").open() as file:
        rows = list(csv.DictReader(file))
    plans: dict[tuple[str, int, int, int], dict[int, str]] = {}
    for row in rows:
        model = (row["name"], int(row["H"]), int(row["I"]), int(row["g"]))
        plans.setdefault(model, {})[int(row["tp"])] = row["plan"]
    # groups of 128 = 2^7 divide the hidden size or not; of the other size TP 8 takes three more powers,
    # and shards of an odd multiple begin in the middle of groups
    found = {
        Cut(scaled(h, 7, 1), scaled(i, 10, 3), g, tuple(of_model[tp] for tp in SIZES))
        for (_, h, i, g), of_model in plans.items()
    }
    return sorted(found, key=lambda cut: (cut.group, cut.intermediate, cut.hidden))


CUTS = cuts()
RUNNABLE = [cut for cut in CUTS if any(plan not in ("na", "none") for plan in cut.plans)]


def facts(cut: Cut, ranks: int) -> LayerFacts:
    return LayerFacts(
        layer="a", hidden=cut.hidden, intermediate=cut.intermediate, checkpoint_group=cut.group, tensor_parallel=ranks
    )


def runnable(cut: Cut) -> list[tuple[int, int]]:
    """(ranks, prepared group) of every size that has a plan."""
    verdicts = ((ranks, group_layer(facts(cut, ranks))) for ranks in SIZES)
    return [(ranks, verdict.widest) for ranks, verdict in verdicts if isinstance(verdict, Grouping)]


def test_the_scaled_sizes_are_few_and_small() -> None:
    """Thirty models divide in as many ways as there are cuts here."""
    assert 10 <= len(CUTS) <= 30
    assert max(cut.hidden * cut.intermediate for cut in CUTS) <= 128 * 3 * 1024


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_scaled_layer_has_the_plans_of_the_models(cut: Cut) -> None:
    """native, prepared in finer groups, none (the gcd is under 32) or na (the group does not divide K)."""
    for ranks, plan in zip(SIZES, cut.plans, strict=True):
        verdict = group_layer(facts(cut, ranks))
        per_rank = cut.intermediate // ranks
        if plan in ("na", "none"):
            assert not isinstance(verdict, Grouping)
            continue
        assert isinstance(verdict, Grouping)
        assert verdict.regrouped is (plan != "native")
        expected = gcd(per_rank, cut.group) if plan == "native" else int(plan.removeprefix("prepare"))
        assert verdict.widest == min(expected, gcd(cut.hidden, cut.group))


@pytest.mark.parametrize("form", ["awq", "compressed", "gptq-v1"])
@pytest.mark.parametrize("cut", RUNNABLE, ids=str)
def test_shards_are_slices_of_the_whole(
    cut: Cut,
    form: str,
    tmp_path: Path,
    made: Callable[..., Any],
    source: Callable[..., Any],
    decode: Callable[[Codes], Array],
) -> None:
    """Every rank's weights, re-grouped or not, have the bits of its slice of the full matrices."""
    layer = made(form, hidden=cut.hidden, intermediate=cut.intermediate, experts=1, group=cut.group, seed=5)
    folder = layer.write(tmp_path)
    whole = {name: layer.weights(f"0.{name}").view(np.uint16) for name in ("gate", "up", "down")}
    for ranks, group in runnable(cut):
        width = cut.intermediate // ranks
        for rank in range(ranks):
            codes = source(folder, tensor_parallel=ranks, tensor_rank=rank).read(0, group)
            mine = slice(rank * width, (rank + 1) * width)
            assert codes.down.scales.shape == (width // group, cut.hidden)
            assert np.array_equal(decode(codes.gate).view(np.uint16), whole["gate"][:, mine])
            assert np.array_equal(decode(codes.up).view(np.uint16), whole["up"][:, mine])
            assert np.array_equal(decode(codes.down).view(np.uint16), whole["down"][mine])


@dataclass(frozen=True)
class Ranked:
    """One rank's call: activations (M, k, I / ranks), output (M, H), and the exact answer of its share."""

    inner: Array
    out: Floats
    answer: Answer

    def bound(self, weights: Floats) -> Floats:
        """How far the output may lie from the exact sum over this rank's slots (CONTRACT 9)."""
        kind, answer = FORMATS["float16"], self.answer
        slots = final_bound(kind, answer.slots, gamma(answer.intermediate) * answer.slot_size)
        sizes = np.abs(answer.slots) + slots
        error = combine(slots, np.abs(weights), answer.valid) + gamma(weights.shape[1]) * combine(
            sizes, np.abs(weights), answer.valid
        )
        return final_bound(kind, combine(answer.slots, weights, answer.valid), error)


@cache
def decided(found: LayerFacts) -> Admission:
    return admit(load_policy("generic-awq"), Settings.from_env({}), found, probe(devices=()))


def run_rank(folder: Path, call: tuple[torch.Tensor, ...], ranks: int, rank: int) -> Ranked:
    """One rank's share, prepared and run by the last route."""
    checkpoint = Checkpoint.open(folder)
    layer = checkpoint.layers[0]
    found = checkpoint.facts(layer, tensor_parallel=ranks, tensor_rank=rank, device="cpu")
    admission = decided(found)
    shape, last = bank_shape(admission), backend(admission, admission.routes[-1].backend)
    assert shape is not None
    assert admission.layout is not None
    banks = last.prepare(CheckpointSource(checkpoint, layer, found), admission.layout, shape, "cpu")
    x, ids, weights = call
    out, inner = torch.empty_like(x), x.new_empty(*ids.shape, shape.intermediate)
    last.run(banks, Call(x, ids, weights, out, inner))
    exported = inner.float().numpy()
    reference = reference_of(checkpoint, layer, found)
    answer = reference.answer(x.float().numpy(), ids.numpy(), weights.numpy(), "float16", exported)
    return Ranked(exported, widen(out.float().numpy()), answer)


@pytest.mark.parametrize("cut", RUNNABLE, ids=str)
def test_ranks_add_up_to_the_whole_layer(cut: Cut, tmp_path: Path, made: Callable[..., Any]) -> None:
    """At every size: activations within their bound, and the sum of the outputs within the sum of the bounds."""
    folder = made("awq", hidden=cut.hidden, intermediate=cut.intermediate, group=cut.group, seed=6).write(tmp_path)
    source = torch.Generator().manual_seed(0)
    x = torch.randn(2, cut.hidden, generator=source).half()
    call = x, torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    weights = widen(call[2].numpy())
    checkpoint = Checkpoint.open(folder)
    layer = checkpoint.layers[0]
    alone = checkpoint.facts(layer, tensor_parallel=1, tensor_rank=0, device="cpu")
    whole = reference_of(checkpoint, layer, alone)
    for ranks, _ in runnable(cut):
        parts = [run_rank(folder, call, ranks, rank) for rank in range(ranks)]
        inner = np.concatenate([part.inner for part in parts], axis=2)
        answer = whole.answer(x.float().numpy(), call[1].numpy(), call[2].numpy(), "float16", inner)
        assert judge_w13(answer, widen(inner)) <= 1.0
        exact = combine(answer.slots, weights, answer.valid)
        error = np.abs(sum(part.out for part in parts) - exact)
        assert np.all(error <= sum(part.bound(weights) for part in parts))
