"""`sm70-moe prepare`: the prepared banks of all ranks, written into a folder that engines read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm70_moe.admission.admit import admit
from sm70_moe.checkpoint.checkpoint import Checkpoint, CheckpointLayer
from sm70_moe.cli.opening import MOST_RANKS, Assume, Written, open_checkpoint
from sm70_moe.cli.output import AsJson, aside, line, print_json
from sm70_moe.cli.output import progress as bar_of
from sm70_moe.cli.pretence import pretended
from sm70_moe.decision import Plain, obstacle_text
from sm70_moe.errors import CheckpointError, SettingsError
from sm70_moe.facts import LayerFacts
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import probe
from sm70_moe.plan.memory import bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import Policy, choose_policy, read_operator
from sm70_moe.record.explanation import size_text
from sm70_moe.settings.layerlists import LayerList
from sm70_moe.settings.settings import Settings

if TYPE_CHECKING:
    from sm70_moe.banks.cache import BankCache


def prepare(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder: config.json and safetensors.")],
    out: Annotated[Path, Written(metavar="OUT", help="Folder to write; SM70_MOE_CACHE=OUT reads it.")],
    tp: Annotated[int, typer.Option("--tp", min=1, max=MOST_RANKS, help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, max=MOST_RANKS, help="Expert-parallel size.")] = 1,
    layers: Annotated[str | None, typer.Option("--layers", help='Only these layers: "0-2,5".')] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Policy name or file.")] = None,
    capability: Annotated[
        str | None, typer.Option("--capability", help='Layouts for a GPU of this compute capability, "7.0" for a V100.')
    ] = None,
    assume: Assume = None,
    as_json: AsJson = False,
) -> None:
    """Write every rank's prepared banks. What is there and whole is kept, so a run that was stopped goes on.

    Exits with 1 if a layer cannot be prepared, or tensors of experts are there that nobody reads; unquantised
    layers need no banks and do not count.
    """
    chosen = None if layers is None else LayerList.parse("--layers", layers)
    settings, policies = read_operator(policy, assume=assume)
    machine = probe(kernels=settings.kernels) if capability is None else pretended(capability, settings.kernels)
    checkpoint = open_checkpoint(folder, settings)
    jobs = Jobs(checkpoint, settings, policies, machine)
    report = Report()
    selected = [layer for layer in checkpoint.layers if chosen is None or (layer.index or 0) in chosen]
    if chosen is not None:
        selected = [layer for layer in selected if layer.index is not None]
    if not selected:
        raise CheckpointError(f"{folder}: no mixture-of-experts layer" + (f" among {chosen}" if chosen else ""))
    fewest = min((layer.experts for layer in selected if layer.experts), default=ep)
    if ep > fewest:
        raise SettingsError(f"--ep {ep}: more ranks than a layer's {fewest} experts; accepted are 1 to {fewest}")
    run(jobs, selected, tuple(product(range(tp), range(ep))), tp, ep, out, report)
    if as_json:
        print_json(report.record())
    else:
        report.show(out)
    if report.refused or checkpoint.unread:
        raise typer.Exit(1)


@dataclass(slots=True)
class Report:
    """What became of the layers: files written and kept, and layers without banks with the reason."""

    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    unquantised: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0

    def record(self) -> dict[str, Plain]:
        return {
            "written": list(self.written),
            "kept": list(self.kept),
            "replaced": dict(self.replaced),
            "unquantised": list(self.unquantised),
            "refused": dict(self.refused),
            "bytes": self.nbytes,
        }

    def show(self, out: Path) -> None:
        for name in self.unquantised:
            line(f"{name}: not quantised, needs no banks")
        for name, reason in self.refused.items():
            aside(f"{name}: {reason}")
        total = len(self.written) + len(self.kept)
        files = f"{total} file{'s' if total != 1 else ''}"
        line(f"{out}: {files}, {size_text(self.nbytes)}; {len(self.written)} written, {len(self.kept)} kept")


@dataclass(frozen=True, slots=True)
class Jobs:
    """Everything that decides how a layer's banks are laid out."""

    checkpoint: Checkpoint
    settings: Settings
    policies: tuple[Policy, ...]
    machine: Machine

    def plan(self, facts: LayerFacts) -> Plan:
        return Plan(admit(choose_policy(self.policies, facts), self.settings, facts, self.machine))

    def facts(self, layer: CheckpointLayer, tp: int, ep: int) -> LayerFacts:
        device = self.machine.devices[0].name
        return self.checkpoint.facts(layer, tensor_parallel=tp, tensor_rank=0, expert_parallel=ep, device=device)


def run(
    jobs: Jobs,
    layers: list[CheckpointLayer],
    ranks: tuple[tuple[int, int], ...],
    tp: int,
    ep: int,
    out: Path,
    report: Report,
) -> None:
    """Every layer and rank, with a progress bar on standard error."""
    from sm70_moe.banks.cache import BankCache

    cache = BankCache(out)
    cache.sweep()
    work = list(plans(jobs, layers, tp, ep, report))
    with bar_of("", total=sum(experts_of(facts, ep, e) for _, facts in work for _, e in ranks)) as bar:
        for layer, facts in work:
            for tensor_rank, expert_rank in ranks:
                rank = replace(facts, tensor_rank=tensor_rank, expert_rank=expert_rank)
                before = bar.done
                bar.at(before, text=f"{layer.name} rank {tensor_rank}.{expert_rank}")

                def progress(done: int, total: int, before: float = before) -> None:
                    bar.at(before + done)

                one(jobs, layer, rank, cache, report, progress)


def experts_of(facts: LayerFacts, ranks: int, rank: int) -> int:
    from sm70_moe.reading.shard import split

    return len(split(facts.experts or 0, ranks, rank))


def plans(
    jobs: Jobs, layers: list[CheckpointLayer], tp: int, ep: int, report: Report
) -> Iterator[tuple[CheckpointLayer, LayerFacts]]:
    """The layers that some route runs; the others go into the report."""
    for layer in layers:
        try:
            facts = jobs.facts(layer, tp, ep)
        except CheckpointError as error:
            report.refused[layer.name] = f"damaged: {error}"
            continue
        plan = jobs.plan(facts)
        required = ", ".join(decision.feature for decision in plan.admission.refused)
        if required:
            report.refused[layer.name] = f"an engine would refuse to start: {required} cannot be had; see explain"
        elif plan.supported:
            yield layer, facts
        elif facts.format == "none":
            report.unquantised.append(layer.name)
        else:
            texts = (f"{f.check}: {obstacle_text(f)}" for f in plan.admission.last_resort.obstacles)
            report.refused[layer.name] = "; ".join(texts)


def one(
    jobs: Jobs,
    layer: CheckpointLayer,
    facts: LayerFacts,
    cache: BankCache,
    report: Report,
    progress: Callable[[int, int], None],
) -> None:
    """One rank's banks of one layer: kept if they are there and whole, else made and written."""
    from sm70_moe.kernels.protocol import Broken
    from sm70_moe.reading.source import CheckpointSource
    from sm70_moe.runtime.making import told
    from sm70_moe.runtime.preparation import key_of, prepare_banks

    plan, source = jobs.plan(facts), CheckpointSource(jobs.checkpoint, layer, facts)
    key, shape = key_of(plan, source), bank_shape(plan.admission)
    backend = jobs.machine.backends[plan.routes[-1].backend]
    assert key is not None  # the source is a checkpoint's
    assert shape is not None
    assert not isinstance(backend, Broken)
    assert plan.layout is not None
    found = cache.load(key, "cpu", progress)
    if found.ignored:
        report.replaced[found.file.name] = found.ignored
        aside(f"{found.file}: not kept, {found.ignored}")
    if found.banks is not None:
        source.check()  # the key was that of the files as they were before
        report.kept.append(found.file.name)
    else:
        try:
            banks = prepare_banks(plan, source, backend, "cpu", progress)
            cache.store(key, banks)
        except OSError as error:
            raise SettingsError(f"{found.file}: cannot be written: {error.strerror or error}") from error
        report.written.append(found.file.name)
        for text in told(plan, banks, source):
            aside(f"note: {text}")
    report.nbytes += found.file.stat().st_size
