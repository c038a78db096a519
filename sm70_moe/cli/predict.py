"""`sm70-moe predict`: times on a V100 that nobody has measured, from the kernels' machine code and a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from sm70_moe.cli.counts import token_counts
from sm70_moe.cli.measured import checks_of, geometry_of, judge, refit, residuals_of
from sm70_moe.cli.output import AsJson, Grid, line, print_json
from sm70_moe.cli.planned import Planned, planned_on
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.declared import FUSED
from sm70_moe.layout import Metadata
from sm70_moe.policy import load_policy
from sm70_moe.prediction.forecast import (
    EXPERTS_SHARE,
    PERFECT_GAIN,
    STEP_MILLISECONDS,
    STEP_SOURCE,
    Forecast,
    forecast,
    limit_of,
)
from sm70_moe.prediction.hardware import GPUS, Gpu, gpu_of
from sm70_moe.prediction.parameters import FITTED, Fitted, load_fitted
from sm70_moe.prediction.readbuild import MOST_TOKENS, ReadBuild
from sm70_moe.prediction.routing import UNIFORM, Routing
from sm70_moe.prediction.work import Call
from sm70_moe.settings.settings import Settings

FIRST = "qwen3.8-flash-next-awq-tp4"
TOKENS = (1, 2, 4, 8)

EACH = ("launch", "first touch", "bytes", "issue", "tensor", "tail")


def predict(
    ctx: typer.Context,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help=f"A shipped policy's name, or a .toml file; {FIRST}, with --compare the file's."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help=f"One of {', '.join(GPUS)}.")] = "v100-sxm2-16",
    tokens: Annotated[
        list[str] | None,
        typer.Option("--tokens", metavar="1,2,...", help="Token counts, separated by commas; may be repeated."),
    ] = None,
    metadata: Annotated[
        Metadata | None,
        typer.Option("--metadata", help="Kind of the banks' metadata; default: as the policy plans with no flag set."),
    ] = None,
    routing: Annotated[str, typer.Option("--routing", help="uniform or overlapping.")] = UNIFORM,
    kernels: Annotated[Path | None, typer.Option("--kernels", help="A build; default: the one in use.")] = None,
    fitted: Annotated[Path, typer.Option("--fitted", help="Fitted numbers; default: the package's.")] = FITTED,
    measured: Annotated[
        Path | None, typer.Option("--compare", metavar="REPORT.json", help="A result of `sm70-moe bench` to judge.")
    ] = None,
    fit_from: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--fit", metavar="BENCH.json OUT", help="Fit the model to an H200's result, and write OUT."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a layer's time on a V100, with a range and what limits it.

    Exit 1 if more than a fifth of --compare's rows lie outside of their ranges; one in ten is expected.
    """
    folder = kernels or Settings.from_env().kernels
    if fit_from is not None:
        check_alone(ctx, "fit_from", ("policy", "kernels"))
        refit(fit_from[0], fit_from[1], folder, policy or FIRST)
        return
    if measured is not None:
        check_alone(ctx, "measured", ("policy", "kernels", "fitted", "as_json"))
        judge(measured, folder, policy, load_fitted(fitted), as_json)
        return
    numbers, wanted, chosen = load_fitted(fitted), load_policy(policy or FIRST), gpu_of(gpu)
    geometry = geometry_of(wanted)
    asked = Asked(planned_on(wanted, chosen.architecture, geometry), chosen, metadata)
    build = ReadBuild.open(folder, chosen.architecture)
    calls = [
        Call(geometry, asked.metadata, count, Routing.of(routing, count, geometry.top_k, geometry.experts))
        for count in counts_of(tokens)
    ]
    found, missing = forecasts(build, calls, asked, numbers)
    if as_json:
        print_json(record(found, missing, asked, build, numbers))
    else:
        show(found, missing, asked, build, numbers)


def counts_of(tokens: list[str] | None) -> tuple[int, ...]:
    """Each number once, in the order in which they were given."""
    return tuple(dict.fromkeys(n for text in tokens or () for n in token_counts(text, MOST_TOKENS))) or TOKENS


@dataclass(frozen=True, slots=True)
class Asked:
    """A policy's plan on a GPU; `given` is the kind of metadata that was asked for instead of the plan's."""

    planned: Planned
    gpu: Gpu
    given: Metadata | None

    @property
    def metadata(self) -> Metadata:
        return self.given or self.planned.metadata

    @property
    def why(self) -> str:
        """Where the kind of metadata comes from."""
        plan = f"{self.planned.policy.name} with no flag set ({self.planned.why})"
        if self.given is None:
            return f"as planned by {plan}"
        return f"as --metadata says; {self.planned.metadata} is planned by {plan}"

    @property
    def has_step(self) -> bool:
        """Is there a figure of the whole model? Only for the first contract on V100s."""
        return self.planned.policy.name == FIRST and self.gpu.architecture == "sm_70"


def check_alone(ctx: typer.Context, option: str, beside: tuple[str, ...]) -> None:
    """Raise SettingsError for an option that `option` would not look at. All are names of parameters."""
    names = {str(each.name): each.opts[0] for each in ctx.command.params}
    sources = {name: ctx.get_parameter_source(name) for name in names if name not in (option, *beside)}
    if odd := [names[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
        accepted = ", ".join(names[name] for name in beside)
        raise SettingsError(f"{', '.join(odd)} beside {names[option]}: accepted are only {accepted}")


Missing = dict[int, str]
"""Number of tokens -> why nothing is predicted for it."""


def forecasts(build: ReadBuild, calls: list[Call], asked: Asked, fitted: Fitted) -> tuple[list[Forecast], Missing]:
    """Calls that the policy gives to no native route, or whose kernels the build lacks, are missing.

    Raises BackendError if all are.
    """
    found, missing = list[Forecast](), Missing()
    for call in calls:
        if reason := asked.planned.unpredicted(call.tokens):
            missing[call.tokens] = reason
            continue
        try:
            found.append(forecast(build, call, asked.gpu, fitted, asked.planned.has_option(FUSED)))
        except BackendError as error:
            missing[call.tokens] = str(error)
    if not found:
        raise BackendError(*missing_lines(missing))
    return found, missing


def missing_lines(missing: Missing) -> list[str]:
    """A line for each reason."""
    reasons: dict[str, list[str]] = {}
    for tokens, reason in missing.items():
        reasons.setdefault(reason, []).append(str(tokens))
    return [f"M = {', '.join(tokens)}: {reason}" for reason, tokens in reasons.items()]


def record(found: list[Forecast], missing: Missing, asked: Asked, build: ReadBuild, fitted: Fitted) -> dict[str, Plain]:
    step: dict[str, Plain] = {
        "milliseconds": STEP_MILLISECONDS,
        "experts_share": EXPERTS_SHARE,
        "perfect_kernel_gain": round(PERFECT_GAIN, 4),
        "source": STEP_SOURCE,
    }
    return {
        "label": found[0].label,
        "policy": asked.planned.policy.name,
        "metadata": {"kind": str(asked.metadata), "why": asked.why},
        "build": build.cubins.id,
        "stale": build.stale,
        "fitted": fitted.record(),
        "whole_step": step if asked.has_step else None,
        "predictions": [forecast.record() for forecast in found],
        "missing": [{"tokens": tokens, "reason": reason} for tokens, reason in missing.items()],
    }


def show(found: list[Forecast], missing: Missing, asked: Asked, build: ReadBuild, fitted: Fitted) -> None:
    stale = ", stale" if build.stale else ""
    line(f"{found[0].label}: {asked.gpu.title}, build {build.cubins.id[:16]}{stale}")
    line(f"{asked.metadata} metadata, {asked.why}")
    line(f"model fitted on {fitted.gpu}, {fitted.date}: {residuals_of(fitted)}")
    numbers = asdict(fitted.parameters)
    line(f"its free numbers: {', '.join(f'{name} {value:.2f}' for name, value in numbers.items())}")
    kernel_table(found).show()
    layer_table(found).show()
    check = checks_of(fitted) if asked.planned.has_option(FUSED) else ""
    for text in (*fused_lines(found), check, *missing_lines(missing)):
        if text:
            line(text)
    if asked.has_step:
        line(
            f"whole model: experts are {EXPERTS_SHARE:.0%} of a {STEP_MILLISECONDS} ms step on V100s ({STEP_SOURCE}); "
            f"even a perfect kernel then moves tokens/s by less than 8 % ({PERFECT_GAIN:.1%})"
        )


def fused_lines(found: list[Forecast]) -> list[str]:
    """The call in one launch, where there is such a kernel: low, likely, high, and what it saves."""
    lines = []
    for each in (one for one in found if one.has_fused):
        name = f"{FUSED}, M = {each.call.tokens}"
        if each.fused is None:
            lines.append(f"{name}: not predicted: {each.missing}")
            continue
        time, saved, parts = each.fused.time, each.fused.saved, each.fused.parts
        blocks = f"{parts.fused.blocks} blocks of {parts.fused.warps} warps"
        lines.append(
            f"{name}: {time.low:.1f} {time.likely:.1f} {time.high:.1f}, saves {saved.likely:.1f} "
            f"({saved.low:.1f} to {saved.high:.1f}) against two launches; {blocks}, barrier {parts.barrier:.1f}"
        )
    return lines


def kernel_table(found: list[Forecast]) -> Grid:
    """Microseconds of each kernel at the likely values; bytes, issue and tensor overlap."""
    grid = Grid("M", "kernel", "MB", "instr/warp", "blocks", "rounds", *EACH, "total", "limit", "free instr. save")
    for each in found:
        for parts, gains in zip(each.parts, each.gains, strict=True):
            work = parts.work
            times = (parts.launch, parts.first, parts.bytes, parts.issue, parts.tensor, parts.tail, parts.total)
            grid.add_row(
                str(each.call.tokens),
                work.kernel,
                f"{work.bytes / 1e6:.2f}",
                f"{work.per_warp:.0f}",
                f"{work.live:.0f} of {work.blocks}",
                f"{parts.rounds:.1f}",
                *(f"{time:.1f}" for time in times),
                limit_of(parts, each.gpu),
                f"{gains.instructions:.1f}",
            )
    return grid


def layer_table(found: list[Forecast]) -> Grid:
    """A layer in microseconds, low to high, beside its floors."""
    grid = Grid("M", "D", "low", "likely", "high", "floor, nominal", "floor, reached", "likely / floor")
    for each in found:
        times = (each.time.low, each.time.likely, each.time.high, each.nominal, each.reached)
        ratio = f"{each.time.likely / each.reached:.2f}"
        grid.add_row(str(each.call.tokens), f"{each.call.routing.distinct:.1f}", *(f"{t:.1f}" for t in times), ratio)
    return grid
