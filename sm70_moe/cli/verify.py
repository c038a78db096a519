"""`sm70-moe verify`: run every admitted route of a layer against the FP64 reference."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm70_moe.admission.checks.layer import BITS, weight_format
from sm70_moe.cli.counts import token_counts
from sm70_moe.cli.opening import MOST_RANKS, Assume
from sm70_moe.cli.output import AsJson, Grid, aside, events_to_stderr, line, print_json, progress
from sm70_moe.cli.ranks import check_ranks
from sm70_moe.decision import Plain, Status, obstacle_text
from sm70_moe.errors import CheckpointError, SettingsError
from sm70_moe.numbers.formats import accepted
from sm70_moe.record.explanation import reason_name
from sm70_moe.settings.settings import Settings

if TYPE_CHECKING:
    from sm70_moe.checkpoint.checkpoint import Checkpoint, CheckpointLayer
    from sm70_moe.evidence.trial import Result
    from sm70_moe.facts import LayerFacts


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder: config.json and safetensors.")],
    tp: Annotated[int, typer.Option("--tp", min=1, max=MOST_RANKS, help="Tensor-parallel size.")] = 1,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Tensor-parallel rank.")] = 0,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, help="Layer number; default: the first that is read here.")
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Token counts, separated by commas.")] = "1,2,8,9,128",
    policy: Annotated[str | None, typer.Option("--policy", help="Policy name or file.")] = None,
    device: Annotated[str, typer.Option("--device", help='Where to run: "cpu" or "cuda:0".')] = "cpu",
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Seed of the inputs.")] = 0,
    assume: Assume = None,
    as_json: AsJson = False,
) -> None:
    """Load, admit, prepare and run a layer; exit 1 if any result leaves its bound."""
    check_ranks(("--rank", rank, tp))
    counts = token_counts(tokens)
    check_device(device)
    events_to_stderr()
    verified, results = run(folder, tp, rank, layer, counts, policy, device, seed, assume)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if as_json:
        records: list[Plain] = [result.record() for result in results]
        print_json({"layer": verified, "results": records, "peak_memory": peak, "ok": all(r.ok for r in results)})
    else:
        show(results, peak)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def check_device(device: str) -> None:
    """SettingsError for a device that torch does not have, or without torch."""
    try:
        import torch
    except ImportError as error:
        raise SettingsError(
            f"verify runs kernels and needs torch ({error}); install sm70-moe with the extra torch: '.[torch]' in its "
            "checkout"
        ) from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # ImportError: a device of another package
        first = str(error).splitlines()[0][:200]  # torch goes on with every device that it has heard of
        raise SettingsError(f"--device {device!r}: {first}; accepted are cpu and the GPUs of this torch") from error
    if torch.device(device).type == "meta":
        raise SettingsError(f"--device {device!r}: holds no numbers; accepted are cpu and the GPUs of this torch")


def run(
    folder: Path,
    tp: int,
    rank: int,
    layer: int | None,
    counts: tuple[int, ...],
    policy: str | None,
    device: str,
    seed: int,
    assume: str | None,
) -> tuple[str, list[Result]]:
    """The layer's name and all results, with a progress bar on standard error."""
    from sm70_moe.cli.opening import open_checkpoint
    from sm70_moe.evidence.verification import calls, prepare, verify_layer
    from sm70_moe.runtime.service import AdmissionService

    settings = Settings.from_env(assume=assume)
    checkpoint = open_checkpoint(folder, settings)
    facts_of = partial(checkpoint.facts, tensor_parallel=tp, tensor_rank=rank, device=device)
    chosen = first_of_ours(checkpoint, facts_of) if layer is None else checkpoint.layer(layer)
    facts = facts_of(chosen)
    with AdmissionService(settings, policy=policy, rank=rank) as service:
        moe = prepare(service, checkpoint, chosen, facts)
        if moe is None:
            stopped = service.admit(facts).admission.last_resort.obstacles
            texts = "; ".join(f"{f.check}: {obstacle_text(f)} {reason_name(f)}" for f in stopped)
            raise CheckpointError(f"{chosen.name}: no route can run it: {texts}")
        with progress("judging routes", calls(moe.plan, counts)) as bar:
            results = []
            for result in verify_layer(moe, checkpoint, chosen, counts, seed):
                results.append(result)
                bar.advance()
    return chosen.name, results


def first_of_ours(checkpoint: Checkpoint, facts_of: Callable[[CheckpointLayer], LayerFacts]) -> CheckpointLayer:
    """The first layer whose format is read here; a word on standard error if it is not the very first."""
    if not checkpoint.layers:
        raise CheckpointError(f"{checkpoint.folder}: no mixture-of-experts layer")
    others: list[str] = []
    for layer in checkpoint.layers:
        try:
            facts = facts_of(layer)
        except CheckpointError as error:
            others.append(f"{layer.name} is damaged ({error})")
            continue
        if weight_format(facts).status is Status.PASS and facts.bits == BITS:
            if others:
                aside(f"note: {others[0]}; the layer that is verified is {layer.name}")
            return layer
        bits = f", {facts.bits} bits" if facts.bits is not None else ""
        others.append(f"{layer.name} is not ours (format {facts.format or 'unknown'}{bits})")
    more = f", nor is any of {len(others) - 1} more" if len(others) > 1 else ""
    raise CheckpointError(f"{checkpoint.folder}: nothing to verify: {others[0]}{more}; accepted are {accepted()}")


def show(results: list[Result], peak: int) -> None:
    from sm70_moe.record.explanation import size_text

    grid = Grid("route", "backend", "tokens", "judged", "time", "W13", "W2", "sum", "finite", "repeatable", "verdict")
    for r in results:
        grid.add_row(
            r.route,
            r.backend,
            str(r.tokens),
            str(r.rows),
            f"{r.seconds * 1e3:.2f} ms",
            f"{r.w13:.3f}",
            f"{r.w2:.3f}",
            f"{r.out:.3f}",
            "yes" if r.finite else "NO",
            "yes" if r.repeatable else "NO",
            "ok" if r.ok else "EXCEEDED",
        )
    grid.show()
    beyond = sorted({expert for r in results for expert in r.beyond})
    if beyond:
        shown = ", ".join(map(str, beyond[:8])) + (f" and {len(beyond) - 8} more" if len(beyond) > 8 else "")
        largest = max(r.largest for r in results)
        line(
            f"W2 sums of experts {shown} lie beyond FP16 before the router's weight, up to {largest:.6g}: infinite by "
            "the contract (a slot is rounded to FP16), whatever the weight; activations in FP32 have no such limit"
        )
    line(f"W13, W2 and sum are maximum bound fractions (at most 1); peak memory {size_text(peak)}")
