"""`sm70-moe sample`: a checkpoint with random weights, in the form that real ones have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict, cast

import typer

from sm70_moe.cli.opening import MOST_LAYERS, Written
from sm70_moe.cli.output import line, progress
from sm70_moe.errors import PolicyError


class Sizes(TypedDict):
    """What a sample is written in; `intermediate` is that of all ranks."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group: int


SMALL: Sizes = {"hidden": 256, "intermediate": 128, "experts": 16, "top_k": 4, "group": 32}
"""Small enough for a laptop; the geometry of the policy sample-awq-tp2."""


def sample(
    folder: Annotated[Path, Written(metavar="DIR", help="Folder to write; must not exist or be empty.")],
    policy: Annotated[
        str | None, typer.Option("--policy", help="Write the full geometry of this policy's contract.")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, max=MOST_LAYERS, help="Number of layers.")] = 2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random weights.")] = 0,
    group: Annotated[
        int | None, typer.Option("--group", min=1, help="Rows in a group, instead of the policy's.")
    ] = None,
    headers: Annotated[
        bool,
        typer.Option("--headers", help="Headers only, over files without contents: enough for explain and inspect."),
    ] = False,
) -> None:
    """Write a Hugging Face style AWQ checkpoint with random weights."""
    sizes = geometry(policy)
    if group is not None:
        sizes["group"] = group
    write(folder, sizes, layers, seed, data=not headers)
    what = "headers of " if headers else ""
    line(f"wrote {what}{layers} layer{'s' if layers != 1 else ''} to {folder}")


def geometry(policy: str | None) -> Sizes:
    """The sizes to write: a policy's contract before tensor parallelism, or small ones."""
    if policy is None:
        return SMALL.copy()
    from sm70_moe.policy import load_policy

    contract = load_policy(policy).contract
    sizes = {
        "hidden": contract.hidden,
        "intermediate": (contract.intermediate or 0) * (contract.tensor_parallel or 1) or None,
        "experts": contract.experts,
        "top_k": contract.top_k,
        "group": contract.weights.checkpoint_group,
    }
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise PolicyError([f"{policy}: its contract leaves {', '.join(missing)} open; a sample needs a geometry"])
    return cast("Sizes", sizes)


def write(folder: Path, sizes: Sizes, layers: int, seed: int, data: bool) -> None:
    """Write with a progress bar on standard error."""
    from sm70_moe.checkpoint.sample import write_sample

    with progress("writing experts") as bar:
        write_sample(folder, layers=layers, seed=seed, progress=bar.at, data=data, **sizes)
