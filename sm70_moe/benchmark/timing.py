"""Timing work on a device: captured in a graph and replayed, or launched eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Shape

from sm70_moe.benchmark.protocol import Protocol

Work = Callable[[], None]
Layer = Callable[[int], None]
"""Launches layer n on the current stream."""


class Stopwatch(Shape):
    """What is asked of the device; `CudaStopwatch` is the real one."""

    def capture(self, work: Work) -> Work:
        """What replays the work: a graph of everything that it launched."""

    def elapsed(self, work: Work) -> float:
        """Microseconds that the device takes for the work, from the first kernel to the end of the last."""

    def wait(self) -> None:
        """Let the device finish."""


class CudaStopwatch:
    """One device, torch's graphs and events. The device must be torch's current one."""

    def capture(self, work: Work) -> Work:
        """See `Stopwatch`. Raises RuntimeError for work that cannot be captured."""
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def elapsed(self, work: Work) -> float:
        import torch

        event: Any = torch.cuda.Event  # has no types
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a layer, and what runs all layers once more in the way that was timed."""

    samples: tuple[float, ...]
    again: Work


def all_layers(layer: Layer, layers: int) -> Work:
    def work() -> None:
        for n in range(layers):
            layer(n)

    return work


def in_graphs(watch: Stopwatch, layer: Layer, layers: int, protocol: Protocol) -> Timing:
    """Samples of graphs of `layers` calls. What happens once has to have happened: run the layers before."""
    work, samples, again = all_layers(layer, layers), [], None
    for share in shares(protocol.samples, protocol.captures):
        again = watch.capture(work)
        for _ in range(protocol.warm):
            again()
        samples += [sample(watch, again, layers, protocol.replays) for _ in range(share)]
    assert again is not None  # there is at least one sample
    return Timing(tuple(samples), again)


def eagerly(watch: Stopwatch, layer: Layer, layers: int, protocol: Protocol) -> Timing:
    """Samples without a graph: the host launches while the device works, and may be what is measured."""
    work = all_layers(layer, layers)
    work()
    return Timing(tuple(sample(watch, work, layers, protocol.replays) for _ in range(protocol.samples)), work)


def sample(watch: Stopwatch, work: Work, layers: int, replays: int) -> float:
    def repeated() -> None:
        for _ in range(replays):
            work()

    return watch.elapsed(repeated) / replays / layers


def shares(count: int, parts: int) -> Iterator[int]:
    """`count` in at most `parts` whole shares, none empty."""
    parts = max(1, min(parts, count))
    for part in range(parts):
        yield count // parts + (part < count % parts)


BATCHES = 5
MOST_CALLS = 200
"""Calls of a batch: two launches each, so that the driver's queue of about a thousand never fills."""
BATCH_SECONDS = 0.2


def host_time(
    call: Callable[[], object], wait: Work, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, ...]:
    """Microseconds of the host for one eager call, in each of a few batches."""
    start = clock()
    call()
    wait()
    once = max(clock() - start, 1e-9)
    calls = max(3, min(MOST_CALLS, int(BATCH_SECONDS / once)))
    found = []
    for _ in range(BATCHES):
        wait()
        start = clock()
        for _ in range(calls):
            call()
        found.append((clock() - start) / calls * 1e6)
    wait()
    return tuple(found)
