"""`python -m sm70_moe.kernels.build`: the native build of a checkout."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from sm70_moe.kernels.build import INSTALLED, build
from sm70_moe.kernels.build.geometry import shipped_geometries
from sm70_moe.kernels.build.manifest import ARCHITECTURES
from sm70_moe.kernels.build.versions import Scope


def main(arguments: Iterable[str] = ()) -> None:
    """Build into the package itself. Arguments are architectures (all if none), and `--tests`."""
    given = list(arguments)
    unknown = [a for a in given if a not in (*ARCHITECTURES, "--tests")]
    if unknown:
        raise SystemExit(f"{unknown[0]!r}: accepted are --tests and {', '.join(ARCHITECTURES)}")
    chosen = tuple(a for a in ARCHITECTURES if a in given) or ARCHITECTURES
    scope = Scope(chosen, shipped_geometries(), "--tests" in given)
    made = build(INSTALLED, scope, cache=Path("build") / "kernels", progress=_tell)
    print(f"{len(made.images)} cubins in {made.folder}, build {made.id[:16]}")


def _tell(done: int, total: int) -> None:
    print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
