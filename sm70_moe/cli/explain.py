"""`sm70-moe explain`: which route would each layer take, and why. Headers only, no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sm70_moe.admission.admit import Admission, admit
from sm70_moe.admission.checks.layer import BITS, weight_format
from sm70_moe.cli.opening import MOST_RANKS, Assume, is_whole, open_checkpoint, tell_notes
from sm70_moe.cli.output import AsJson, aside, line, print_json
from sm70_moe.cli.pretence import pretended
from sm70_moe.cli.ranks import check_ranks
from sm70_moe.decision import Plain, Reason, Status
from sm70_moe.errors import CheckpointError, SettingsError
from sm70_moe.facts import CallFacts, LayerFacts
from sm70_moe.grouping import Grouping, group_layer
from sm70_moe.kernels.declared import BFLOAT16_FROM, DTYPES
from sm70_moe.machine.devices import Device
from sm70_moe.machine.probe import probe
from sm70_moe.plan.layergroup import LayerGroup, collapse
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.speed import speed_text
from sm70_moe.policy import choose_policy, read_operator
from sm70_moe.record.explanation import (
    Line,
    build_line,
    group_record,
    heading,
    line_text,
    lines_of,
    memory_line,
    refusal_lines,
)

COLOURS = {
    "admitted": "green",
    "fell back": "yellow",
    "off": "dim",
    "refused": "bold red",
    "not ours": "dim",
    "unsupported": "bold red",
}


def explain(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder: config.json and safetensors.")],
    tp: Annotated[int, typer.Option("--tp", min=1, max=MOST_RANKS, help="Tensor-parallel size.")] = 1,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Tensor-parallel rank.")] = 0,
    ep: Annotated[int, typer.Option("--ep", min=1, max=MOST_RANKS, help="Expert-parallel size.")] = 1,
    ep_rank: Annotated[int, typer.Option("--ep-rank", min=0, help="Expert-parallel rank.")] = 0,
    capability: Annotated[
        str | None, typer.Option("--capability", help='Pretend a GPU of this compute capability, "7.0" for a V100.')
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help=f"The engine's dtype, of {', '.join(DTYPES)}; default: config.json's."),
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=0, help="Also name the route of this call.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Policy name or file.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Unknown variables are errors; exit 1 if a layer is refused.")
    ] = False,
    assume: Assume = None,
    as_json: AsJson = False,
) -> None:
    """Say which route each layer would take on this machine, and what stops the others.

    Exits with 1 if a layer is damaged, or tensors of experts are there that nobody reads.
    """
    check_ranks(("--rank", rank, tp), ("--ep-rank", ep_rank, ep))
    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype!r}: accepted are {', '.join(DTYPES)}")
    settings, policies = read_operator(policy, strict=strict or None, assume=assume)
    for notice in settings.notices(policies):
        aside(f"warning: {notice.text}")
    kernels, cache = settings.kernels, settings.kernel_cache
    machine = (
        probe(kernels=kernels, kernel_cache=cache) if capability is None else pretended(capability, kernels, cache)
    )
    if capability is not None:
        aside(f"note: a GPU of capability {capability} is pretended, and its self-tests to have passed")
    device = machine.devices[0].name
    checkpoint = open_checkpoint(folder, settings)
    tell_notes(checkpoint)
    activations = engine_dtype(dtype, checkpoint.config.dtype, machine.devices[0])
    admissions: list[Admission] = []
    damaged = 0
    for layer in checkpoint.layers:
        try:
            facts = checkpoint.facts(
                layer, tensor_parallel=tp, tensor_rank=rank, expert_parallel=ep, expert_rank=ep_rank, device=device
            )
            facts = replace(facts, activations=activations)
            if can_be_read(facts):
                checkpoint.check(layer)
        except CheckpointError as error:
            damaged += 1
            aside(f"damaged: {error}")
            continue
        admissions.append(admit(choose_policy(policies, facts), settings, facts, machine, others=policies))
    groups = list(collapse(admissions))
    if admissions or not checkpoint.layers:
        show(groups, tokens, as_json)
    if damaged or not is_whole(checkpoint):
        raise typer.Exit(1)
    if strict and any(a.refused or not (a.supported or a.foreign) for a in admissions):
        raise typer.Exit(1)


def can_be_read(facts: LayerFacts) -> bool:
    """Could banks be prepared, were all tensors as they should be? What stops that is admission's to tell."""
    if weight_format(facts).status is not Status.PASS or facts.bits != BITS:
        return False
    grouping = group_layer(facts)
    return isinstance(grouping, Grouping) or grouping.reason is not Reason.GROUP_INDIVISIBLE


def engine_dtype(asked: str | None, declared: str | None, device: Device) -> str | None:
    """What an engine's activations will be: asked for, or declared; FP16 where a declared BF16 has no tensor cores."""
    if asked is not None or declared != "bfloat16" or device.capability is None:
        return asked or declared
    major, minor = device.capability
    if 10 * major + minor >= BFLOAT16_FROM:
        return declared
    aside(
        f"note: config.json says bfloat16, which {device.architecture} has no tensor cores for; float16 is assumed, as "
        "an engine must be told there (--dtype says otherwise)"
    )
    return "float16"


def show(groups: list[LayerGroup], tokens: int | None, as_json: bool) -> None:
    if as_json:
        records: list[Plain] = [{**group_record(g), **call_record(g, tokens)} for g in groups]
        print_json({"groups": records})
        return
    for group in groups:
        line(heading(group), "bold")
        for each in lines_of(group):
            line(line_text(each), style(each))
        for text in refusal_lines(group):
            line(text, "bold red")
        plan = Plan(group.example)
        if tokens is not None:
            line(f"  a call of {tokens} token{'s' if tokens != 1 else ''} takes {route_name(plan, tokens)}")
        line(f"runs: {speed_text(plan)}")
        line(build_line(plan))
        line(memory_line(plan, group.count))
        line()
    if not groups:
        line("no mixture-of-experts layer in this checkpoint")


def style(line: Line) -> str:
    return "" if line.detail else COLOURS.get(line.outcome, "bold red")


def call_record(group: LayerGroup, tokens: int | None) -> dict[str, Plain]:
    return {} if tokens is None else {"tokens": tokens, "route": route_name(Plan(group.example), tokens)}


def route_name(plan: Plan, tokens: int) -> str:
    """Route of a call as a well-behaved engine makes it."""
    facts = plan.admission.facts
    if plan.admission.refused:
        return "none: refused"
    if not plan.supported:
        return "none: not ours" if plan.admission.foreign else "none: unsupported"
    call = CallFacts.usual(tokens, facts.hidden or 0, facts.top_k or 0, facts.activations or "float16")
    route = plan.route(call)
    return route.name if route else "none: no tokens"
