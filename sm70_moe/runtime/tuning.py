"""Tuning: how batches are launched, chosen by measuring on the device before anything is captured.

What is chosen changes times only: every tactic has the same bits, and one that has not is not taken. Rank 0 measures,
or finds what it kept, and all ranks run what it chose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, RankDisagreement
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.declared import TUNED
from sm70_moe.kernels.native.tactics import BUCKETS
from sm70_moe.kernels.protocol import Tunable
from sm70_moe.plan.gathering import gather
from sm70_moe.plan.memory import backend
from sm70_moe.plan.plan import Plan
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.tuned import Key, TunedFile, Warn, file_in
from sm70_moe.runtime.wants import wants_tuning

if TYPE_CHECKING:
    import torch.distributed as dist

BETTER = 0.98
"""A tactic is taken if it has at most this share of the rule's time: less is what measurements differ by."""

Measure = Callable[[str], float]
"""Microseconds of a tactic. Raises BackendError for one that cannot be had."""

Table = Mapping[str, Mapping[str, Mapping[int, str]]]
"""Layer -> backend -> largest number of tokens of a bucket -> tactic."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was chosen for a bucket of one kind of layer, by rank 0: measured times, none for what was kept, and why
    tactics were left out."""

    key: Key
    tactic: str
    times: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Plain]:
        key = self.key
        told = ", ".join(f"{name} {time:.1f} us" for name, time in self.times.items()) or "kept from before"
        return {
            "device": key.device,
            "geometry": key.geometry,
            "tokens": key.bucket,
            "tactic": self.tactic,
            "times": {name: round(time, 2) for name, time in self.times.items()},
            "left_out": dict(self.left_out),
            "text": f"{key.geometry}, up to {key.bucket} tokens: {self.tactic} ({told})",
        }


def tune(
    layers: Sequence[MoELayer],
    kernel_cache: Path | bool,
    warn: Warn,
    group: dist.ProcessGroup | None,
    seconds: float,
) -> tuple[Tuned, ...]:
    """Choose for the layers whose plans ask for it, and give them the plans that say so; call it on every rank.

    `kernel_cache` is the setting, beside whose kernels choices are kept; `warn` hears why they are not.
    Returns what this rank measured or had kept: nothing on ranks other than 0. Raises BackendError while a CUDA graph
    is captured, and RankDisagreement on every rank alike where one cannot run what rank 0 chose, fails or is gone.
    """
    wanted = sorted((layer for layer in layers if wants_tuning(layer.plan)), key=lambda layer: layer.plan.layer)
    if not wanted:
        return ()
    kept, made = TunedFile(file_in(kernel_cache), warn), list[Tuned]()
    table = together(lambda: chosen(wanted, kept, made), lambda table: lacking(wanted, table), group, seconds)
    for layer in wanted:
        apply(layer, table.get(layer.plan.layer, {}))
    return tuple(made)


def chosen(layers: Sequence[MoELayer], kept: TunedFile, made: list[Tuned]) -> Table:
    """What is best for each layer; layers that are alike are measured once. What was done is added to `made`."""
    if any(layer.banks.device.type == "cuda" for layer in layers) and torch.cuda.is_current_stream_capturing():
        raise BackendError("tuning: a CUDA graph is being captured on this stream, expected a call before any capture")
    known: dict[Key, str] = {}
    table: dict[str, dict[str, dict[int, str]]] = {}
    for layer in layers:
        for name, runs in tunable(layer):
            for bucket in buckets(layer, name):
                key = key_of(layer, name, bucket)
                if key not in known:
                    made.append(best(key, layer, runs, kept))
                    known[key] = made[-1].tactic
                table.setdefault(layer.plan.layer, {}).setdefault(name, {})[bucket] = known[key]
    return table


def best(key: Key, layer: MoELayer, runs: Tunable, kept: TunedFile) -> Tuned:
    """What was kept for a bucket, else what is measured now, and kept."""
    facts = layer.plan.admission.facts
    offered = runs.tactics(layer.banks, facts.top_k or 1, key.bucket, facts.activations or "float16")
    found = kept.find(key, offered)
    if found is not None:
        return Tuned(key, found)
    tactic, times, left_out = choose(offered, Stand.of(layer, runs, key.bucket))
    if times:
        kept.keep(key, tactic)
    return Tuned(key, tactic, times, left_out)


def choose(offered: Sequence[str], measure: Measure) -> tuple[str, dict[str, float], dict[str, str]]:
    """The fastest of some tactics, the first of which is the rule; every time; and what could not be measured.

    The rule stays where nothing is clearly faster, or it could not be measured itself. Of equals, the earlier.
    """
    if not offered:
        raise BackendError("tuning: no tactic, expected at least the rule")
    times: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for tactic in offered:
        try:
            times[tactic] = measure(tactic)
        except BackendError as error:
            left_out[tactic] = str(error)
    rule = offered[0]
    if rule not in times:
        return rule, {}, left_out
    fastest = min(times, key=times.__getitem__)
    return fastest if times[fastest] <= BETTER * times[rule] else rule, times, left_out


@dataclass(slots=True)
class Stand:
    """A call of a layer that is measured by one tactic after the other, and the bits that the first one gave."""

    layer: MoELayer
    runs: Tunable
    call: Call
    bits: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: MoELayer, runs: Tunable, tokens: int) -> Stand:
        """A router's call: experts of the whole layer, different ones for each token."""
        facts, banks, device = layer.plan.admission.facts, layer.banks, layer.banks.device
        random = torch.Generator().manual_seed(tokens)
        top_k, experts = facts.top_k or 1, facts.experts or banks.shape.experts
        x = torch.randn(tokens, banks.shape.hidden, generator=random).to(getattr(torch, facts.activations or "float16"))
        ids = torch.rand(tokens, experts, generator=random).topk(top_k).indices.int() - layer.first
        weights = torch.full((tokens, top_k), 1 / top_k)
        on_device = (x.to(device), ids.to(device), weights.to(device))
        return cls(layer, runs, Call(*on_device, torch.empty_like(on_device[0])))

    def __call__(self, tactic: str) -> float:
        """Raises BackendError also for a tactic with other bits than the first that was measured."""
        self.call.out.fill_(torch.nan)
        time = self.runs.timed(self.layer.banks, self.call, tactic, self.layer.space)
        found = self.call.out.view(torch.int16)
        if self.bits is None:
            self.bits = found.clone()
        elif not torch.equal(self.bits, found):
            raise BackendError(f"tactic {tactic!r}: its result has other bits than the rule's")
        return time


def tunable(layer: MoELayer) -> Iterator[tuple[str, Tunable]]:
    """The backends of a layer's routes that have something to choose, by name."""
    for name in dict.fromkeys(route.backend for route in layer.plan.routes):
        found: Any = backend(layer.plan.admission, name)
        if TUNED in found.options and isinstance(found, Tunable):
            yield name, found


def buckets(layer: MoELayer, name: str) -> Iterator[int]:
    """Those in which the plan runs calls by this backend."""
    for bucket in BUCKETS:
        routes = layer.plan.reachable(bucket)
        if routes and routes[0].backend == name:
            yield bucket


def key_of(layer: MoELayer, name: str, bucket: int) -> Key:
    plan, shape = layer.plan, layer.banks.shape
    facts, device = plan.admission.facts, plan.admission.device
    images = next(route.choice.images for route in plan.routes if route.backend == name)
    sizes = f"{shape.experts} of {facts.experts} experts x {facts.top_k}, {shape.hidden} x {shape.intermediate}"
    text = f"{name} {sizes}, {layer.banks.layout.tag}, {facts.activations or 'float16'}"
    return Key(device.model if device else "", images, text, bucket)


def lacking(layers: Sequence[MoELayer], table: Table) -> str:
    """Which of rank 0's tactics cannot be run here; nothing if all can."""
    for layer in layers:
        facts, mine = layer.plan.admission.facts, dict(tunable(layer))
        for name, by_bucket in table.get(layer.plan.layer, {}).items():
            for bucket, tactic in by_bucket.items():
                runs = mine.get(name)
                dtype = facts.activations or "float16"
                if runs is None or tactic not in runs.tactics(layer.banks, facts.top_k or 1, bucket, dtype):
                    return f"{layer.plan.layer}: {name} has no {tactic!r} for {bucket} tokens"
    return ""


def apply(layer: MoELayer, by_backend: Mapping[str, Mapping[int, str]]) -> None:
    """Run a layer by what was chosen, and have its plan say so; the rule is no choice, and is not told."""
    plan, found = layer.plan, dict[str, list[tuple[int, str]]]()
    for name, runs in tunable(layer):
        facts = plan.admission.facts
        for bucket, tactic in by_backend.get(name, {}).items():
            offered = runs.tactics(layer.banks, facts.top_k or 1, bucket, facts.activations or "float16")
            if tactic != offered[0]:
                found.setdefault(name, []).append((bucket, tactic))
        runs.take(layer.banks, facts.top_k or 1, dict(found.get(name, ())))
    layer.plan = Plan(plan.admission, {name: tuple(chosen) for name, chosen in found.items()})


def together(
    mine: Callable[[], Table], lacks: Callable[[Table], str], group: dist.ProcessGroup | None, seconds: float
) -> Table:
    """Rank 0's table on every rank of a group, or of this process alone; only rank 0 calls `mine`.

    What rank 0 raises is raised there, and told to the others; a rank that lacks what was chosen stops all.
    """
    import torch.distributed as dist

    if group is None and not (dist.is_available() and dist.is_initialized()):
        return mine()
    error: Exception | None = None
    told: list[Any] = ["", {}]
    if dist.get_rank(group) == 0:
        try:
            told[1] = mine()
        except Exception as raised:
            error, told[0] = raised, f"{type(raised).__name__}: {raised}"
    refused, found = json.loads(gather(json.dumps(told).encode(), group, seconds)[0])
    if error is not None:
        raise error
    if refused:
        raise RankDisagreement(f"tuning: rank 0 stopped: {refused}")
    table = {
        layer: {n: {int(b): t for b, t in row.items()} for n, row in rows.items()} for layer, rows in found.items()
    }
    answers = gather((lacks(table) or "-").encode(), group, seconds)
    if odd := [f"rank {rank}: {text.decode()}" for rank, text in enumerate(answers) if text != b"-"]:
        raise RankDisagreement(f"tuning: {'; '.join(odd)}")
    return table
