"""`python -m sm70_moe.kernels.build`: the native build of a checkout."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from sm70_moe.errors import Sm70MoeError
from sm70_moe.kernels.build import INSTALLED, build
from sm70_moe.kernels.build.geometry import shipped_architectures, shipped_geometries
from sm70_moe.kernels.build.manifest import ARCHITECTURES
from sm70_moe.kernels.build.versions import Scope

ROOT = Path(__file__).resolve().parents[3]
"""A checkout, or the folder that the package is installed in."""


def main(arguments: Sequence[str]) -> None:
    """Build into the package itself. Exit 2, as `sm70-moe`, for bad input and for what cannot be built."""
    scope = scope_of(arguments)
    try:
        made = build(INSTALLED, scope, cache=cache_of(ROOT), progress=_tell)
    except Sm70MoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(made.images)} cubins in {made.folder}, build {made.id[:16]}")


def scope_of(arguments: Sequence[str]) -> Scope:
    """What the arguments ask for, in the usual order of architectures."""
    parser = ArgumentParser(prog="python -m sm70_moe.kernels.build", description="The native build of a checkout.")
    known = ", ".join(ARCHITECTURES)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=f"of {known}; default: all of them")
    parser.add_argument("--tests", action="store_true", help="also the versions that only tests run")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.architectures if name not in ARCHITECTURES]:
        parser.error(f"{unknown[0]!r}: accepted are --tests and {known}")
    chosen = tuple(name for name in ARCHITECTURES if name in given.architectures)
    return Scope(chosen or ARCHITECTURES, shipped_geometries(), given.tests, shipped_architectures())


def cache_of(root: Path) -> Path | None:
    """`build/kernels` of a checkout, wherever it is called from; nothing is kept beside an installed package."""
    return root / "build" / "kernels" if (root / "pyproject.toml").is_file() else None


def _tell(done: int, total: int) -> None:
    print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
