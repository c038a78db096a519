"""The arms of a measurement, in the order in which they are timed.

An arm is a row of this module: a name, how it is launched, which part of a layer it runs, and a function
that makes its work ready on a stand. What cannot run raises BackendError, and the reason is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sm70_moe.benchmark import readonly
from sm70_moe.benchmark.native import NATIVES, native_layer
from sm70_moe.benchmark.readonly import Shape
from sm70_moe.benchmark.result import Row
from sm70_moe.benchmark.stand import Stand
from sm70_moe.benchmark.timing import Layer
from sm70_moe.benchmark.traffic import expert_bytes, tile_bytes
from sm70_moe.errors import BackendError
from sm70_moe.evidence.trial import Runs
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.launch import Step
from sm70_moe.plan.memory import backend
from sm70_moe.timings import BOTH, DEPENDENT, FLOOR, LEGACY, PLAIN, ROOFLINE, SEPARATOR, W2, W13

LEGACY_LAYERS, LEGACY_REPLAYS = 4, 2
"""Torch takes hundreds of kernels for a layer: fewer layers in a graph, and fewer replays a sample."""


@dataclass(frozen=True, slots=True)
class Ready:
    """An arm on a stand.

    `outputs` are what it writes: filled with NaN before the check, finite after it. `run` is what is
    judged against the reference, bound to the bank of the last of `layers`; None where nothing is computed.
    `may_be_eager`: timed without a graph if it cannot be captured.
    """

    layer: Layer
    outputs: tuple[torch.Tensor, ...] = ()
    run: Runs | None = None
    layers: int | None = None
    replays: int | None = None
    may_be_eager: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """What is timed. `distinct`: the separating kernel gives it the different experts; `bytes_each`
    counts what it reads of one expert."""

    name: str
    launch: str
    part: str
    ready: Callable[[Stand], Ready]
    shape: str | None = None
    distinct: bool = False
    bytes_each: int = 0


def arms(stand: Stand, found: Sequence[Row]) -> Iterator[Arm]:
    """All arms. `found` has the rows of the arms so far, in any order: the parts and the dependent launch of
    the roofline take the shape that was fastest."""
    yield Arm(SEPARATOR, PLAIN, BOTH, lambda s: Ready(s.separate()))
    yield Arm(FLOOR, PLAIN, BOTH, lambda s: Ready(s.launched(partial(floor, s))))
    yield from rooflines(stand, found)
    for native in NATIVES:
        for launch, part in native.ways:
            each = expert_bytes(stand.setup.layout, stand.setup.shape, part)
            yield Arm(native.name, launch, part, partial(native_ready, native.name, launch, part), bytes_each=each)
    yield Arm(LEGACY, PLAIN, BOTH, legacy, bytes_each=expert_bytes(stand.setup.layout, stand.setup.shape))


def floor(stand: Stand, layer: int) -> tuple[Step, ...]:
    """What two launches cost that do nothing."""
    nothing = Step("roofline", "nothing", grid=(1,))
    return stand.separator(layer), nothing, nothing


def rooflines(stand: Stand, found: Sequence[Row]) -> Iterator[Arm]:
    """The same bytes in two launches that compute nothing, in several shapes: the fastest counts."""
    setup = stand.setup
    shapes = {shape.label: shape for shape in readonly.shapes(setup.layout, setup.shape, stand.routing.most_distinct)}
    if not shapes:
        yield roofline_arm(stand, None, PLAIN, BOTH)
        return
    for shape in shapes.values():
        yield roofline_arm(stand, shape, PLAIN, BOTH)
    plain = [row for row in found if (row.arm, row.launch, row.part) == (ROOFLINE, PLAIN, BOTH)]
    fastest = min(plain, key=lambda row: row.microseconds, default=None)
    chosen = shapes[fastest.shape or ""] if fastest else next(iter(shapes.values()))
    for launch, part in ((DEPENDENT, BOTH), (PLAIN, W13), (PLAIN, W2)):
        yield roofline_arm(stand, chosen, launch, part)


def roofline_arm(stand: Stand, shape: Shape | None, launch: str, part: str) -> Arm:
    def ready(on: Stand) -> Ready:
        if shape is None:
            raise BackendError("no launch shape of the read-only kernels holds a layer of this size")
        return Ready(on.launched(readonly.steps(on, shape, launch == DEPENDENT, part)))

    each = tile_bytes(stand.setup.layout, stand.setup.shape, part)
    return Arm(ROOFLINE, launch, part, ready, shape.label if shape else None, True, each)


def native_ready(name: str, launch: str, part: str, stand: Stand) -> Ready:
    """One of our routes, as the plan chooses it for this number of tokens."""
    native = next(n for n in NATIVES if n.name == name)
    layer, run = native_layer(native, launch, part, stand)
    return Ready(layer, (stand.inner if part == W13 else stand.out,), run)


def legacy(stand: Stand) -> Ready:
    """The portable route, which runs everything."""
    setup, separate = stand.setup, stand.separate()
    runs = backend(setup.plan.admission, setup.plan.routes[-1].backend)
    layers = min(LEGACY_LAYERS, stand.routing.layers)

    def layer(n: int) -> None:
        separate(n)
        runs.run(setup.bank(n), Call(stand.x, stand.ids, stand.weights, stand.out), setup.space)

    run = partial(runs.run, setup.bank(layers - 1))
    return Ready(layer, (stand.out,), run, layers, LEGACY_REPLAYS, may_be_eager=True)
