"""The read-only roofline: the bytes of a layer in the launches of a layer, folded by XOR.

It is launched in several shapes, since which one is fastest depends on the device and on the number of
experts; the fastest is what routes are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sm70_moe.benchmark.stand import Stand
from sm70_moe.benchmark.traffic import Tile, parts, tile
from sm70_moe.errors import BackendError
from sm70_moe.kernels.native.backend import DEPENDENT_FROM
from sm70_moe.kernels.native.launch import Step
from sm70_moe.layout import BankLayout, BankShape
from sm70_moe.timings import W2, W13

MOST_THREADS = 1024
"""CUDA's limit of threads in a block, all architectures."""

W13_LOADS = (5, 4, 2)
"""Loads a thread of W13's kernel; it holds at most 6."""

W2_LOADS = (1, 2, 4, 8)
"""Loads a thread for which there are kernels of W2."""

W2_SHAPES = ((128, 1), (256, 1), (256, 2), (512, 1), (512, 2), (256, 4), (256, 8), (256, 16))
"""Threads that a block of W2's kernel has at most, and blocks that share a tile's experts."""

EACH = 0
"""Loads of W2's kernel that has a block for each tile of each expert, as W13's has: for any sizes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One launch shape: W2's blocks have at most `threads` and `split` of them share a tile; `wide` threads
    for W13. `loads` are W2's a thread, or `EACH`."""

    threads: int
    split: int
    wide: int
    loads: int

    @property
    def label(self) -> str:
        shared = "each" if self.loads == EACH else f"s{self.split}"
        return f"t{self.threads} {shared} w{self.wide}"


def shapes(layout: BankLayout, shape: BankShape, most: int) -> tuple[Shape, ...]:
    """Every shape that holds `most` different experts."""
    w13, w2 = tile(layout, shape, W13), tile(layout, shape, W2)
    each = [(threads, 1, EACH) for threads in widths(w2)]
    return tuple(
        Shape(threads, split, wide, loads)
        for threads, split, loads in (*holding(w2, most), *each)
        for wide in widths(w13)
    )


def widths(tile: Tile) -> tuple[int, ...]:
    """Threads of a block that reads one tile."""
    found = dict.fromkeys(max(32, -(-tile.loads // each)) for each in W13_LOADS)
    return tuple(wide for wide in found if wide <= MOST_THREADS)


def holding(w2: Tile, most: int) -> Iterator[tuple[int, int, int]]:
    """(threads, split, loads a thread) of W2 that read `most` experts in one go."""
    for threads, split in W2_SHAPES:
        at_once = threads // w2.loads * split
        loads = next((n for n in W2_LOADS if n * at_once >= most), None)
        if at_once and loads:
            yield threads, split, loads


def steps(stand: Stand, shape: Shape, dependent: bool, part: str) -> Callable[[int], tuple[Step, ...]]:
    """What is launched for a layer. Raises BackendError for a dependent launch that the device does not have."""
    launcher = stand.setup.launcher
    if dependent and launcher is not None and int(launcher.architecture.removeprefix("sm_")) < DEPENDENT_FROM:
        raise BackendError(f"{launcher.architecture} has no dependent launch: sm_{DEPENDENT_FROM} is the first")

    def of_layer(n: int) -> tuple[Step, ...]:
        made = {W13: lambda: read_w13(stand, shape, n, dependent), W2: lambda: read_w2(stand, shape, n, dependent)}
        return (stand.separator(n, distinct=True), *(made[name]() for name in parts(part)))

    return of_layer


def read_w13(stand: Stand, shape: Shape, layer: int, dependent: bool) -> Step:
    """A block for each tile of each different expert."""
    found, values = arguments(stand, layer, W13)
    grid = (found.tiles, len(stand.routing.distinct(layer)))
    return Step("roofline", "roofline_w13", grid=grid, threads=shape.wide, values=values, dependent=dependent)


def read_w2(stand: Stand, shape: Shape, layer: int, dependent: bool) -> Step:
    """A block, or `split` of them, for each tile of all experts."""
    found, values = arguments(stand, layer, W2)
    if shape.loads == EACH:
        grid = (found.tiles, len(stand.routing.distinct(layer)))
        kernel = "roofline_w2_tiles"
        return Step("roofline", kernel, grid=grid, threads=shape.threads, values=values, dependent=dependent)
    return Step(
        "roofline",
        f"roofline_w2_{shape.loads}",
        grid=(found.tiles, shape.split),
        threads=shape.threads // found.loads * found.loads,
        values=values | {"count": len(stand.routing.distinct(layer))},
        dependent=dependent,
    )


def arguments(stand: Stand, layer: int, part: str) -> tuple[Tile, dict[str, float]]:
    setup = stand.setup
    found = tile(setup.layout, setup.shape, part)
    return found, {
        "words": setup.words(layer, part),
        "groups": setup.groups(layer, part),
        "ids": stand.ids.data_ptr(),
        "out": stand.sink.data_ptr(),
        "tiles": found.tiles,
        "tile_bytes": found.words,
        "group_bytes": found.groups,
    }
