"""Measurements given to `sm70-moe predict`: to fit the model to, or to judge it by."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import typer

from sm70_moe import opening
from sm70_moe.cli.output import Grid, line, print_json
from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.files import check_target, target
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.declared import FUSED
from sm70_moe.policy import Policy, load_policy, shipped_policies
from sm70_moe.policy.load import LARGEST
from sm70_moe.prediction.comparison import EXPECTED, MOST_OUTSIDE, Compared, Comparison, compare
from sm70_moe.prediction.fit import fit, gpu_named, with_checks, write_fitted
from sm70_moe.prediction.hardware import GPUS, gpu_of
from sm70_moe.prediction.measurements import Run, load_run
from sm70_moe.prediction.parameters import Fitted
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.spread import SIDES
from sm70_moe.timings import FUSED as ONE_LAUNCH

FITTED_ON = "h200"


def geometry_of(policy: Policy) -> Geometry:
    """One rank's sizes. Raises BackendError for a policy without native kernels."""
    found = Geometry.of_policy(tomllib.loads(opening.content(Path(policy.origin), LARGEST).decode()))
    if found is None:
        raise BackendError(f"{policy.origin}: no kernels to predict; accepted is a policy that names every size")
    return found


def sizes_of(run: Run, policy: Policy | None) -> Geometry:
    """What a run timed: its file's own sizes, or those of the policy that the file names.

    Raises SettingsError where `policy`, which was asked for, is another.
    """
    if run.geometry is None:
        return geometry_of(named(run, policy))
    if policy is not None:
        run.check_geometry(geometry_of(policy))
    return run.geometry


def named(run: Run, policy: Policy | None) -> Policy:
    """The policy that a file without sizes names. Raises SettingsError if there is none, or `policy` is another."""
    found = policy or shipped(run.policy)
    if found is None:
        names = ", ".join(each.name for each in shipped_policies())
        raise SettingsError(
            f"{run.source}: says no sizes, only policy {run.policy!r}; accepted are {names}, or --policy"
        )
    if found.name != run.policy or run.digest not in (None, found.digest):
        digest = f", digest {run.digest}" if run.digest else ""
        raise SettingsError(
            f"{run.source}: measured with policy {run.policy!r}{digest}, and says no sizes; accepted is a file of "
            f"{found.name!r}, digest {found.digest}"
        )
    return found


def shipped(name: str) -> Policy | None:
    return next((policy for policy in shipped_policies() if policy.name == name), None)


def refit(source: Path, out: Path, folder: Path | None, policy: str) -> None:
    """Fit, write the file, and say how well it went."""
    check_target("--fit", out)
    if target(out) == target(source):
        raise SettingsError(f"--fit {out}: is the measurement itself; accepted is a file of its own")
    run, gpu = load_run(source), gpu_of(FITTED_ON)
    geometry = sizes_of(run, load_policy(policy))
    today = datetime.now(UTC).date().isoformat()
    build = ReadBuild.open(folder, gpu.architecture)
    made = fit(run, build, geometry, gpu, run.date or today)
    unchecked = ""
    try:
        made = with_checks(made, run, build, geometry, gpu)
    except BackendError as error:
        unchecked = f"{FUSED}: not checked: {error}"
    write_fitted(made, out)
    line(f"{out}: {len(made.residuals)} rows of {run.gpu}, {residuals_of(made)}")
    for text in filter(None, (*differences(run, build, None), checks_of(made), unchecked)):
        line(text)


def checks_of(fitted: Fitted) -> str:
    """What the model says of rows that it was not fitted to; nothing without any."""
    if not fitted.checks:
        return ""
    errors = ", ".join(f"{error:+.1%} ({name})" for name, error in fitted.checks.items())
    return f"{FUSED} on {fitted.gpu}, a check and not fitted: model / measured - 1 is {errors}"


def residuals_of(fitted: Fitted) -> str:
    bounded = f"; at the end of their range: {', '.join(fitted.bounded)}" if fitted.bounded else ""
    return (
        f"left-out error {fitted.spread:.1%} (root mean square), {fitted.worst:.1%} at worst, "
        f"for {', '.join(f'M = {tokens}' for tokens in fitted.left_out)}{bounded}"
    )


def differences(run: Run, build: ReadBuild, policy: Policy | None) -> Iterator[str]:
    """What was timed and what is read are not the same: builds, or what a policy of this name says."""
    if run.build != build.cubins.id:
        yield f"timed with build {run.build or 'none'}, and build {build.cubins.id} is read"
    if policy is not None and run.digest is not None and run.digest != policy.digest:
        yield (
            f"timed with policy {run.policy}, digest {run.digest}, and {policy.name} has digest {policy.digest}; "
            "sizes are the file's"
        )


def judge(path: Path, folder: Path | None, policy: str | None, fitted: Fitted, as_json: bool) -> None:
    """Measured beside predicted; exit 1 if more than a fifth of the rows lie outside of their ranges."""
    run, chosen = load_run(path), None if policy is None else load_policy(policy)
    gpu = gpu_named(run.gpu)
    if gpu is None:
        raise BackendError(f"{path}: measured on {run.gpu!r}; predictions are for {', '.join(GPUS)}")
    geometry, build = sizes_of(run, chosen), ReadBuild.open(folder, gpu.architecture)
    found = compare(run, build, geometry, gpu, fitted)
    differing = list(differences(run, build, chosen or shipped(run.policy)))
    if as_json:
        rows: list[Plain] = [each.record() for each in found.rows]
        timed: dict[str, Plain] = {"gpu": run.gpu, "build": run.build, "policy": run.policy}
        read: dict[str, Plain] = {"read_build": build.cubins.id, "geometry": dict(geometry.record())}
        rest: dict[str, Plain] = {"differences": [*differing], "rows": rows, "missing": [*found.missing]}
        print_json(timed | read | rest | verdict(found))
    else:
        line(f"measured on {run.gpu} ({run.source}), beside what the model says of {gpu.title}")
        line(f"policy {run.policy}: {', '.join(f'{k} {v}' for k, v in geometry.record().items())}")
        for text in differing:
            line(text)
        comparison_table(found.rows).show()
        for text in found.missing:
            line(f"not compared: {text}")
        for text in outside_lines(found):
            line(text)
    if found.against:
        raise typer.Exit(1)


def verdict(found: Comparison) -> dict[str, Plain]:
    """How many rows lie outside, how many may, and whether that counts against the model."""
    shares = {"expected": round(EXPECTED, 3), "most": MOST_OUTSIDE}
    return {"outside": {"rows": [each.row.name for each in found.outside], **shares}, "against": found.against}


def outside_lines(found: Comparison) -> list[str]:
    """The count, and each row outside."""
    count = f"{len(found.outside)} of {len(found.rows)} rows outside of their {SIDES[0]} to {SIDES[1]} % ranges"
    lines = [f"{count}; one in ten is expected" + found.against * ", and more than a fifth count against the model"]
    for each in found.outside:
        times = each.predicted
        lines.append(f"  {each.row.name}: {each.measured:.1f}, predicted {times.low:.1f} to {times.high:.1f}")
    return lines


def comparison_table(found: tuple[Compared, ...]) -> Grid:
    grid = Grid("M", "part", "metadata", "routing", "measured", "low", "likely", "high", "ratio", "inside")
    for each in found:
        row, times = each.row, each.predicted
        numbers = (each.measured, times.low, times.likely, times.high)
        names = (str(row.tokens), "one launch" if row.arm == ONE_LAUNCH else row.part, row.metadata, row.routing)
        grid.add_row(*names, *(f"{n:.1f}" for n in numbers), f"{each.ratio:.2f}", "yes" if each.inside else "no")
    return grid
