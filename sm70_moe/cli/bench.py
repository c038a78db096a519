"""`sm70-moe bench`: how long a layer takes on this GPU, next to what reading its weights takes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm70_moe.benchmark.protocol import MOST_TOKENS, OVERLAPPING, ROUTINGS, UNIFORM, Protocol
from sm70_moe.benchmark.result import Key, Result, Row, Skipped
from sm70_moe.cli.counts import LARGEST_CALL, token_counts
from sm70_moe.cli.opening import MOST_RANKS
from sm70_moe.cli.output import Grid, aside, events_to_stderr, line, status
from sm70_moe.cli.verify import first_of_ours
from sm70_moe.decision import Plain
from sm70_moe.errors import SettingsError
from sm70_moe.files import check_target, target, write
from sm70_moe.layout import Metadata
from sm70_moe.machine.probe import probe
from sm70_moe.policy import choose_policy, load_policy, read_operator
from sm70_moe.settings.settings import Settings
from sm70_moe.timings import BOTH, PLAIN, ROOFLINE

if TYPE_CHECKING:
    from sm70_moe.facts import LayerFacts
    from sm70_moe.machine.machine import Machine
    from sm70_moe.policy import Policy

DEFAULT_POLICY = "qwen3.8-flash-next-awq-tp4"
"""The first contract."""

EVERY_METADATA = ",".join(kind.value for kind in Metadata)


def bench(
    policy: Annotated[
        str | None, typer.Option("--policy", help=f"Policy name or file whose geometry is measured; {DEFAULT_POLICY}.")
    ] = None,
    layer: Annotated[
        Path | None,
        typer.Option("--layer", metavar="DIR", help="Measure the geometry of this checkpoint's experts instead."),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, max=MOST_RANKS, help="Tensor-parallel size; with --layer.")] = 1,
    device: Annotated[str, typer.Option("--device", help="Which GPU.")] = "cuda:0",
    tokens: Annotated[str, typer.Option("--tokens", help="Token counts, separated by commas.")] = "1,2,4,8",
    metadata: Annotated[
        str | None,
        typer.Option("--metadata", help=f"Of {EVERY_METADATA}; default: 4-byte, with --report all of them."),
    ] = None,
    routing: Annotated[str, typer.Option("--routing", help=f"Of {','.join(ROUTINGS)}.")] = f"{UNIFORM},{OVERLAPPING}",
    samples: Annotated[int, typer.Option("--samples", help="Samples an arm, at least 7.")] = 9,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layer calls in a CUDA graph.")] = 48,
    banks: Annotated[int | None, typer.Option("--banks", help="Banks of a layer; default: up to 12 that fit.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Seed of weights, inputs and routing.")] = 0,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Begin nothing new after so long, making weights included.")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request", metavar="P,T", help="Instead: a prompt of P tokens and T decoded ones, all --layers."
        ),
    ] = None,
    chunk: Annotated[
        int, typer.Option("--chunk", help="Tokens of the prompt in one call; with --request.")
    ] = LARGEST_CALL,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png or .svg; needs the extra `plot`.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write all that others need to use your numbers, to be sent in."),
    ] = None,
) -> None:
    """Time the routes, the read-only roofline, the empty floor and torch in one run; exit 1 if a result is wrong."""
    if request is not None:
        if plot or report:
            raise SettingsError("--request: has no picture and no report, expected --json alone")
        a_request(request, chunk, policy, layer, tp, device, layers, banks, seed, as_json)
        return
    kinds = metadata if metadata is not None else EVERY_METADATA if report else Metadata.FOUR_BYTE.value
    protocol = Protocol(
        tokens=token_counts(tokens, MOST_TOKENS),
        metadata=tuple(kinds.split(",")),
        routings=tuple(routing.split(",")),
        layers=layers,
        banks=banks,
        samples=samples,
        seed=seed,
        seconds=seconds,
    )
    check_files(as_json, plot, report)
    settings = Settings.from_env()
    chosen, facts = subject(policy, layer, tp, settings, device)
    for notice in settings.notices((chosen,)):
        aside(f"warning: {notice.text}")
    machine = probe(kernels=settings.kernels, dependent=settings.dependent_launch, kernel_cache=settings.kernel_cache)
    check_gpu(device, machine)
    events_to_stderr()
    result, sent = measured(chosen, facts, settings, machine, device, protocol, report is not None)
    try:
        if report:
            write("--report", report, text_of(sent))
        if as_json:
            write("--json", as_json, text_of(result.record()))
        if plot:
            from sm70_moe.benchmark.plot import draw

            write("--plot", plot, draw(result, plot))
    finally:  # last, since a reader may close the pipe; and whatever befell the files
        show(result)
    if report:
        tell_of(report)
    if not result.ok:
        raise typer.Exit(1)


def a_request(
    text: str,
    chunk: int,
    policy: str | None,
    layer: Path | None,
    tp: int,
    device: str,
    layers: int,
    banks: int | None,
    seed: int,
    as_json: Path | None,
) -> None:
    """Time a whole request as the plan runs it; on a CPU too, where it says nothing about a GPU."""
    from sm70_moe.benchmark.session import facts_of_contract, planned
    from sm70_moe.cli.requested import measure, read, tell

    wanted = read(text, layers, chunk)
    check_files(as_json, None, None)
    settings = Settings.from_env()
    chosen, facts = subject(policy, layer, tp, settings, device)
    machine = probe(kernels=settings.kernels, dependent=settings.dependent_launch, kernel_cache=settings.kernel_cache)
    if device != "cpu":
        check_gpu(device, machine)
    events_to_stderr()
    plan = planned(chosen, facts or facts_of_contract(chosen, device), settings, machine)
    tell(plan, wanted, measure(plan, wanted, device, banks, seed), device, as_json)


def check_files(as_json: Path | None, plot: Path | None, report: Path | None) -> None:
    """SettingsError for a file that could not be written at the end, or drawn, or that two options name."""
    from sm70_moe.benchmark.plot import ENDINGS, require_matplotlib

    given = [("--json", as_json, ()), ("--plot", plot, ENDINGS), ("--report", report, ())]
    taken: dict[Path, str] = {}
    for option, path, endings in given:
        if path is not None:
            check_target(option, path, endings)
            if (other := taken.setdefault(target(path), option)) != option:
                raise SettingsError(f"{option} {path}: {other} is the same file; accepted is one of its own")
    if plot is not None:
        require_matplotlib()


def subject(
    policy: str | None, layer: Path | None, tp: int, settings: Settings, device: str
) -> tuple[Policy, LayerFacts | None]:
    """Whose layer is measured: that of a policy's contract (no facts), or of a checkpoint's experts, the first layer
    that is read here, on rank 0 of `tp`. Raises SettingsError for ranks without a checkpoint."""
    if layer is None:
        if tp != 1:
            raise SettingsError(f"--tp {tp}: a policy has its own; accepted with --layer")
        return load_policy(policy if policy is not None else settings.policy or DEFAULT_POLICY), None
    from sm70_moe.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(layer)
    facts_of = partial(checkpoint.facts, tensor_parallel=tp, tensor_rank=0, device=device)
    facts = facts_of(first_of_ours(checkpoint, facts_of))
    _, policies = read_operator(policy, settings)
    return choose_policy(policies, facts), facts


def check_gpu(device: str, machine: Machine) -> None:
    """SettingsError for a machine on which nothing can be timed."""
    gpus = [d.name for d in machine.devices if d.capability is not None]
    if machine.device(device) is None or not device.startswith("cuda"):
        found = ", ".join(gpus) or "none, or a torch that is built for CPUs (`sm70-moe doctor` says which)"
        raise SettingsError(f"--device {device!r}: bench needs an NVIDIA GPU; here are {found}")
    try:
        import torch
    except ImportError as error:
        raise SettingsError(
            f"bench needs torch ({error}); install sm70-moe with the extra torch: '.[torch]' in its checkout"
        ) from error
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise SettingsError(f"--device {device!r}: this torch cannot use it: {first}") from error


def measured(
    policy: Policy,
    facts: LayerFacts | None,
    settings: Settings,
    machine: Machine,
    device: str,
    protocol: Protocol,
    report: bool,
) -> tuple[Result, Plain]:
    """The result, and its report if one is wanted; what is measured stands on standard error."""
    from sm70_moe.benchmark.place import Place
    from sm70_moe.benchmark.report import reported
    from sm70_moe.benchmark.session import facts_of_contract, opened, planned, run

    place = Place.cuda(device)
    with status("admission") as said:
        plan = planned(policy, facts or facts_of_contract(policy, device), settings, machine)
        launcher = opened(device, settings)
        result = run(plan, protocol, place, launcher, said)
        return result, reported(result, plan, launcher) if report else None


def tell_of(report: Path) -> None:
    """Where a report goes, and what is in it."""
    from sm70_moe.benchmark.report import CONTENTS

    line(f"{report}: please send it to where you have sm70-moe from, attached to an issue there. In it: {CONTENTS}.")


def text_of(record: object) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def show(result: Result) -> None:
    """Times and ratios, one table for each kind of metadata; then details, host times and what was not run."""
    build = f"build {result.build[:16]}" if result.build else "no native build"
    line(f"{result.gpu.get('name')}   policy {result.policy}   {build}")
    for kind in dict.fromkeys(row.metadata for row in result.rows):
        rows = [row for row in result.rows if row.metadata == kind and is_shown(result, row)]
        keys = list(dict.fromkeys(row.key for row in rows))
        title = f"us a layer, the separating kernel included (ratio to the fastest plain roofline), {kind} metadata"
        grid = Grid("arm", *(f"M={key.tokens} {key.routing}" for key in keys))
        for label in dict.fromkeys(map(label_of, rows)):
            found = {row.key: row for row in rows if label_of(row) == label}
            grid.add_row(label, *(cell(result, found.get(key)) for key in keys))
        line(title, "bold")
        grid.show()
    details(result)
    for host in result.host:
        line(f"host: {host.microseconds:.1f} us an eager call, M={host.tokens} {host.metadata} {host.route}")
    for text in skipped_lines(result.skipped):
        line(text)
    for row in result.rows:
        if row.wrong:
            line(f"{label_of(row)} {row.metadata} M={row.tokens} {row.routing}: {row.verdict}", "bold")


def details(result: Result) -> None:
    """The same rows, each with what it read and how far its samples lie apart."""
    heads = ("arm", "metadata", "M", "routing", "shape", "layers", "D", "MB", "us", "spread", "GB/s")
    grid = Grid(*heads, "x roofline", "x floor", "verdict")
    for row in result.rows:
        if is_shown(result, row):
            rate, ratio, over = row.gigabytes_per_second, result.ratio(row), result.floor_ratio(row)
            grid.add_row(
                *(label_of(row), row.metadata, str(row.tokens), row.routing, row.shape or "", str(row.layers)),
                *(f"{row.distinct:.1f}", f"{row.bytes / 1e6:.2f}", f"{row.microseconds:.2f}", f"{row.spread:.2f}"),
                *(f"{rate:.0f}" if rate else "", f"{ratio:.2f}" if ratio else "", f"{over:.2f}" if over else ""),
                row.verdict.partition(":")[0],
            )
    grid.show()


def is_shown(result: Result, row: Row) -> bool:
    """Of the plain roofline's shapes only the fastest."""
    whole = (row.arm, row.launch, row.part) == (ROOFLINE, PLAIN, BOTH)
    return not whole or row is result.roofline(row.key)


def label_of(row: Row | Skipped) -> str:
    """ "ours dependent", "roofline plain w13 alone"."""
    words = [row.arm, row.launch or "", f"{row.part} alone" if row.part not in (None, BOTH) else ""]
    return " ".join(word for word in words if word)


def cell(result: Result, row: Row | None) -> str:
    if row is None:
        return "not run"
    ratio = result.ratio(row)
    return f"{row.microseconds:.2f}" + (f" {ratio:.2f}x" if ratio else "") + (" WRONG" if row.wrong else "")


def skipped_lines(skipped: tuple[Skipped, ...]) -> list[str]:
    """One line for each arm and reason, with where it was not run."""
    places: dict[tuple[str, str], list[str]] = {}
    for one in skipped:
        key = Key(one.metadata or "", one.tokens or 0, one.routing or "")
        places.setdefault((label_of(one), one.reason), []).append(f"M={key.tokens} {key.routing} {key.metadata}")
    return [f"not run: {label} ({', '.join(where)}): {reason}" for (label, reason), where in places.items()]
