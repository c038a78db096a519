"""`sm70-moe build-kernels`: native kernels for a policy of one's own."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from sm70_moe.cli.output import AsJson, print_json
from sm70_moe.errors import BackendError, PolicyError, SettingsError
from sm70_moe.kernels.build import build
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.manifest import ARCHITECTURES
from sm70_moe.kernels.build.versions import Scope
from sm70_moe.policy import load_policy


def build_kernels(
    policy: Annotated[Path, typer.Argument(metavar="POLICY_FILE", help="A policy file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder, or an earlier build that is replaced.")],
    architectures: Annotated[
        list[str] | None, typer.Option("--arch", help="Only these, such as sm_70; default: all of them.")
    ] = None,
    tests: Annotated[bool, typer.Option("--tests", help="Also the versions that only tests run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels for a policy's geometry, and for any other, into a folder for SM70_MOE_KERNELS."""
    scope = Scope(chosen(architectures or []), geometries(policy), tests)
    made = build(out, scope, progress=lambda done, total: typer.echo(f"{done} of {total} compiled", err=True))
    if as_json:
        print_json({"id": made.id, "folder": str(made.folder), "images": len(made.images)})
    else:
        use = f"SM70_MOE_KERNELS={made.folder} SM70_MOE_POLICY={policy.resolve()}"
        typer.echo(f"{len(made.images)} cubins, build {made.id[:16]}; use them with {use}")


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
    found = Geometry.of_policy(tomllib.loads(policy.read_text(encoding="utf-8")))
    if found is None:
        raise BackendError(
            f"{policy}: no kernels to build for; accepted is a contract with hidden, intermediate, experts, top_k and "
            "a group, and a feature with native = true"
        )
    return (found,)
