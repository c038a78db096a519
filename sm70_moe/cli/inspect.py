"""`sm70-moe inspect`: what a checkpoint holds and how it could be cut. Headers only, no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.cli.opening import is_whole, open_checkpoint
from sm70_moe.cli.output import AsJson, Grid, line, print_json
from sm70_moe.decision import Plain, obstacle_text
from sm70_moe.layout import Metadata
from sm70_moe.record.explanation import reason_name, size_text
from sm70_moe.record.inspection import SIZES, Alike, Cut, Kind, Verdict, inspect, totals
from sm70_moe.settings.settings import Settings


def inspect_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder: config.json and safetensors.")],
    as_json: AsJson = False,
) -> None:
    """Say which layers a checkpoint has, and what each number of ranks would mean.

    Exits with 1 if one is damaged, or tensors of experts are there that nobody reads.
    """
    settings = Settings.from_env()
    checkpoint = open_checkpoint(folder, settings)
    found = inspect(checkpoint, settings.assume)
    if as_json:
        print_json(record(checkpoint, found))
    else:
        show(checkpoint, found)
    if any(one.kind is Kind.DAMAGED for one in found) or not is_whole(checkpoint):
        raise typer.Exit(1)


def record(checkpoint: Checkpoint, found: tuple[Alike, ...]) -> Plain:
    sums: dict[str, dict[str, Plain]] = {}
    for way, ranks, nbytes in totals(found):
        sizes: Plain = {metadata.value: size for metadata, size in nbytes.items()} if nbytes else None
        sums.setdefault(way, {})[str(ranks)] = sizes
    return {
        "folder": str(checkpoint.folder),
        "model_type": checkpoint.config.model_type,
        "tensors": len(checkpoint.headers),
        "unread": list(checkpoint.unread),
        "notes": list(checkpoint.notes),
        "layers": [one.record() for one in found],
        "bytes_per_rank": sums,
    }


def show(checkpoint: Checkpoint, found: tuple[Alike, ...]) -> None:
    model = checkpoint.config.model_type or "unknown model"
    line(f"{checkpoint.folder}   {model}, {len(checkpoint.headers)} tensors")
    for one in found:
        line()
        line(heading(one), "bold")
        for text in details(one):
            line(f"  {text}")
        if one.kind is Kind.QUANTISED:
            show_cuts(one)
    if not found:
        line("no mixture-of-experts layer in this checkpoint")
    show_totals(found)


def heading(one: Alike) -> str:
    count = len(one.layers)
    aside = ", beside the model's own layers" if one.aside else ""
    return f"{one.name}   {count} layer{'s' if count != 1 else ''}   {one.kind}{aside}"


def details(one: Alike) -> list[str]:
    """Sizes, format, what stops it, notes."""
    lines = [one.fault] if one.fault else []
    facts = one.facts
    if facts is not None:
        packing = f" {facts.packing}" if facts.packing else ""
        group = f", group {facts.checkpoint_group}" if facts.checkpoint_group is not None else ""
        bits = f", {facts.bits} bits" if facts.bits is not None else ""
        zeros = {True: ", with zero points", False: ", symmetric", None: ""}[facts.zero_point]
        plain = facts.format == "none"
        lines.append("format none" if plain else f"format {facts.format or 'unknown'}{packing}{bits}{group}{zeros}")
        lines.append(
            f"{known(facts.experts)} experts, top-{known(facts.top_k)}, hidden {known(facts.hidden)}, "
            f"intermediate {known(facts.intermediate)}"
        )
    lines += [f"{f.check}: {obstacle_text(f)}   {reason_name(f)}" for f in one.stopped]
    lines += [f"note: {note}" for note in one.notes]
    if one.beside:
        lines.append(f"left to the engine: {', '.join(one.beside)}")
    return lines


def known(size: int | None) -> str:
    return "?" if size is None else str(size)


def show_cuts(one: Alike) -> None:
    grid = Grid("ranks", "cut", "experts", "intermediate", "groups", *(f"{m} metadata" for m in Metadata))
    ways: tuple[tuple[str, Callable[[int], Cut | None]], ...] = (
        ("tensor parallel", one.tensor_parallel),
        ("expert parallel", one.expert_parallel),
    )
    reasons: list[str] = []
    for way, cut in ways:
        for ranks in SIZES:
            made = cut(ranks)
            if made is not None and (ranks > 1 or way == "tensor parallel"):
                grid.add_row(str(ranks), way if ranks > 1 else "whole", *cells(made))
                reasons += [f"{way} {ranks}: {obstacle_text(made.finding)}"] if made.finding is not None else []
    grid.show()
    for reason in reasons:
        line(f"  {reason}")


def cells(cut: Cut) -> list[str]:
    if cut.verdict is Verdict.REFUSED:
        return ["", "", "refused", *("" for _ in Metadata)]
    groups = f"re-grouped to {cut.group}" if cut.verdict is Verdict.REGROUPED else f"native, {cut.group}"
    return [str(cut.experts), str(cut.intermediate), groups, *(size_text(size) for size in cut.nbytes.values())]


def show_totals(found: tuple[Alike, ...]) -> None:
    """Banks of all layers together, if there is more than one group of them."""
    if sum(one.kind is Kind.QUANTISED for one in found) < 2:
        return
    grid = Grid("ranks", "cut", *(f"{m} metadata" for m in Metadata), title="All quantised layers, fullest rank")
    for way, ranks, nbytes in totals(found):
        if ranks > 1 or way == "tensor_parallel":
            sizes = [size_text(size) for size in nbytes.values()] if nbytes else ["refused", "", ""]
            grid.add_row(str(ranks), way.replace("_", " ") if ranks > 1 else "whole", *sizes)
    line()
    grid.show()
