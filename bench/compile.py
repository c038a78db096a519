"""Compile the versions that `decode.py` runs into .bench/: needs NVRTC, no GPU."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

from sm70_moe.kernels.build.nvrtc import Compiler
from sm70_moe.kernels.machinecode.census import census

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "sm70_moe" / "kernels" / "cuda"
OUT = ROOT / ".bench"
FIRST = {"HIDDEN": 2560, "INTERMEDIATE": 160, "TOP_K": 10, "GROUP": 32}

GEOMETRIES = {
    "next32": (2048, 128, 10, 32),
    "next64": (2048, 128, 10, 64),
    "next128": (2048, 128, 10, 128),
    "qwen30": (2048, 192, 8, 32),
    "sample": (256, 64, 4, 32),
    # of geometries.py
    "q2": (2048, 384, 8, 128),
    "q1": (2048, 768, 8, 128),
    "glm": (4096, 352, 8, 32),
    "qnext": (2048, 512, 10, 128),
    "mix": (4096, 3584, 2, 128),
    "mix32": (4096, 3584, 2, 32),
    "lite": (2048, 704, 6, 64),
    "mini": (3072, 192, 8, 64),
}


def geometry(hidden: int, inner: int, top_k: int, group: int) -> dict[str, int]:
    return {"HIDDEN": hidden, "INTERMEDIATE": inner, "TOP_K": top_k, "GROUP": group}


def jobs() -> dict[str, tuple[str, dict[str, object]]]:
    """Name -> source and macros. `o`: order, `m`: metadata, `s`: the quad-pair step."""
    made: dict[str, tuple[str, dict[str, object]]] = {"roofline": ("roofline", {})}
    every = {"first": FIRST, "runtime": {}, **{name: geometry(*sizes) for name, sizes in GEOMETRIES.items()}}
    for source in ("decode_w13", "decode_w2"):
        for name, sizes in every.items():
            for order, metadata, step in product((0, 1), (4, 3, 2), (0, 1)):
                if order and name not in ("first", "runtime"):
                    continue
                macros = {**sizes, "ORDER": order, "METADATA": metadata, "VOLTA_STEP": step}
                made[f"{source}.{name}.o{order}.m{metadata}.s{step}"] = (source, macros)
    for source, found in json.loads((ROOT / "bench" / "variants.json").read_text()).items():
        for name, macros in found.items():
            made[f"{source}.first.{name}"] = (source, {**FIRST, **macros})
    return made


def main() -> None:
    OUT.mkdir(exist_ok=True)
    compiler = Compiler()
    includes = {path.name: path.read_text() for path in SOURCES.glob("*.cuh")}
    only = sys.argv[1:]
    for name, (source, macros) in jobs().items():
        if only and not any(part in name for part in only):
            continue
        options = ["--gpu-architecture=sm_90", "--std=c++17", *(f"-DMOE_{k}={v}" for k, v in macros.items())]
        image = compiler.compile(f"{source}.cu", (SOURCES / f"{source}.cu").read_text(), includes, options)
        (OUT / f"{name}.cubin").write_bytes(image)
        if ".v" in name:
            for k in census(image):
                print(f"{name:28s} {k.kernel:8s} regs {k.registers:3d} local {k.local} late {k.late_loads}")


if __name__ == "__main__":
    main()
