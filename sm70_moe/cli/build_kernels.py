"""`sm70-moe build-kernels`: native kernels for a policy of one's own, or for a checkpoint ahead of its first start."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from sm70_moe import opening
from sm70_moe.cli.kernel_cache import Filled, fill
from sm70_moe.cli.opening import MOST_RANKS, Written
from sm70_moe.cli.output import AsJson, aside, line, print_json
from sm70_moe.errors import BackendError, PolicyError, SettingsError
from sm70_moe.kernels.build import build
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.manifest import ARCHITECTURES
from sm70_moe.kernels.build.versions import Scope
from sm70_moe.policy import load_policy
from sm70_moe.policy.load import LARGEST


def build_kernels(
    given: Annotated[
        Path, typer.Argument(metavar="POLICY_FILE", help="A policy file; with --cache a checkpoint's folder.")
    ],
    out: Annotated[
        Path | None,
        Written(metavar="OUT", help="New folder, or an earlier build that is replaced."),
    ] = None,
    architectures: Annotated[
        list[str] | None, typer.Option("--arch", help="Only these, such as sm_70; default: all of them.")
    ] = None,
    tests: Annotated[bool, typer.Option("--tests", help="Also the versions that only tests run.")] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="Into the folder of SM70_MOE_KERNEL_CACHE, for a checkpoint's layers.")
    ] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, max=MOST_RANKS, help="With --cache: tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, max=MOST_RANKS, help="With --cache: expert-parallel size.")] = 1,
    capabilities: Annotated[
        list[str] | None,
        typer.Option("--capability", help='With --cache: "7.0" for a V100; default: the GPUs of this machine.'),
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="With --cache: policy name or file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile kernels: for a policy's geometry, and for any other, into a folder for SM70_MOE_KERNELS.

    With --cache: those that a checkpoint's layers would have compiled at their first start. Exit 1 if some of
    them break their budgets: kernels for any sizes run there.
    """
    if cache != (out is None):
        raise SettingsError("build-kernels: accepted are POLICY_FILE OUT, and DIR --cache")
    if out is None:
        show_filled(fill(given, tp, ep, capabilities or [], policy), as_json)
    else:
        for_policy(given, out, Scope(chosen(architectures or []), geometries(given), tests), as_json)


def for_policy(policy: Path, out: Path, scope: Scope, as_json: bool) -> None:
    """A build of its own."""
    made = build(out, scope, progress=lambda done, total: aside(f"{done} of {total} compiled"))
    if as_json:
        print_json({"id": made.id, "folder": str(made.folder), "images": len(made.images)})
    else:
        use = f"SM70_MOE_KERNELS={made.folder} SM70_MOE_POLICY={policy.resolve()}"
        line(f"{len(made.images)} cubins, build {made.id[:16]}; use them with {use}")


def show_filled(filled: Filled, as_json: bool) -> None:
    """What is in the folder now; exit 1 if something is not used."""
    if as_json:
        print_json(filled.record())
    else:
        for text in filled.refused:
            aside(f"not used: {text}")
        line(f"{len(filled.compiled)} versions compiled, {len(filled.kept)} there before, in {filled.folder}")
    if filled.refused:
        raise typer.Exit(1)


def chosen(names: list[str]) -> tuple[str, ...]:
    """The architectures asked for, in the usual order; all of them if none was named."""
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        raise SettingsError(f"--arch {unknown[0]!r}: accepted are {', '.join(ARCHITECTURES)}")
    return tuple(name for name in ARCHITECTURES if not names or name in names)


def geometries(policy: Path) -> tuple[Geometry, ...]:
    """The geometry of a policy file, checked as a policy first."""
    if policy.suffix != ".toml":
        raise PolicyError([f"{policy}: accepted is a policy file that ends in .toml"])
    load_policy(policy)
    found = Geometry.of_policy(tomllib.loads(opening.content(policy, LARGEST).decode()))
    if found is None:
        raise BackendError(
            f"{policy}: no kernels to build for; accepted is a contract with hidden, intermediate, experts, top_k and "
            "a group, and a feature with native = true"
        )
    return (found,)
