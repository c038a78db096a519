"""`sm70-moe kernels`: what the native build holds, and what its machine code costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sm70_moe.cli.output import AsJson, Grid, line, print_json
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.build import INSTALLED, SOURCES, expected_id
from sm70_moe.kernels.build.gate import Row, survey
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.settings.settings import Settings

COLUMNS = ("registers", "stack", "local", "shared", "instructions", "tensor", "wide_loads", "late_loads", "barriers")


def kernels(
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="A build; default: the one in use.")] = None,
    architecture: Annotated[str | None, typer.Option("--arch", help="Only this one, such as sm_70.")] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Only kernels of this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the machine code of every kernel: registers, memory, instructions, budgets. Exit 1 if one is exceeded."""
    own = folder or Settings.from_env().kernels
    cubins = Cubins.open(own or INSTALLED)
    if cubins is None:
        raise BackendError(f"{own or INSTALLED}: no native build; accepted is a folder with one, or an installation")
    stale = cubins.id != expected_id(cubins, own=own is None)
    every = list(survey(cubins, load_manifests(SOURCES)))
    check_choice("--arch", architecture, {row.found.architecture for row in every})
    check_choice("--kernel", kernel, {row.found.kernel for row in every})
    rows = [r for r in every if architecture in (None, r.found.architecture) and kernel in (None, r.found.kernel)]
    if as_json:
        print_json({"id": cubins.id, "stale": stale, "kernels": [record(row) for row in rows]})
    else:
        show(cubins, stale, rows)
    if any(row.overruns for row in rows):
        raise typer.Exit(1)


def check_choice(option: str, chosen: str | None, there: set[str]) -> None:
    """SettingsError for what the build does not have."""
    if chosen is not None and chosen not in there:
        raise SettingsError(f"{option} {chosen!r}: not in this build; accepted are {', '.join(sorted(there))}")


def record(row: Row) -> Plain:
    return {**row.found.record(), "version": row.image.version.name, "overruns": list(row.overruns)}


def show(cubins: Cubins, stale: bool, rows: list[Row]) -> None:
    line(f"build {cubins.id[:16]}{', stale: build again' if stale else ''} in {cubins.folder}")
    grid = Grid("kernel", "version", *(name.replace("_", " ") for name in COLUMNS), "calls", "budget")
    for row in rows:
        numbers = [str(getattr(row.found, name)) for name in (*COLUMNS, "calls")]
        version = row.image.version.name.partition(".")[2]
        grid.add_row(row.found.kernel, version, *numbers, "; ".join(row.overruns) or "kept")
    grid.show()
