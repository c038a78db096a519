"""Loading: several threads read a rank's experts from a source into banks.

Each thread reads, packs and writes one expert at a time, or a few small ones, so that is all that
exists beside the banks. An expert has its own place in the banks: the result does not depend on
the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import torch

from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.banks.threads import default_readers, each
from sm70_moe.errors import BackendError
from sm70_moe.layout import BankLayout, BankShape
from sm70_moe.numbers.codes import ExpertCodes, WeightSource
from sm70_moe.numbers.rows import ExpertRows
from sm70_moe.reading.offers import BatchSource, fetch, read_batch, read_rows

AHEAD = 16
"""Experts that the system is told of before they are read, so that the disk never waits for us. Measured:
with 4 the disk was idle now and then, more than 16 gained nothing."""

BATCH_BYTES = 1 << 20
"""Codes of one matrix of the experts that are read at once. Two threads that read small experts one by one
spent more than half of their time on passing Python's lock to each other (docs/loading.md)."""

Progress = Callable[[int, int], None]
"""Called with the number of experts done and of all experts, in the thread that loads."""


def prepare(
    source: WeightSource,
    layout: BankLayout,
    shape: BankShape,
    device: str | torch.device,
    progress: Progress | None = None,
    readers: int | None = None,
) -> Banks:
    """Read every expert of a rank into new banks.

    `readers` threads read, as many as there are processors if not given (at most 4). Raises
    BackendError if source and shape disagree, and what the source raises; the source can be read
    again after that. Whatever ends the loading, a KeyboardInterrupt too, the threads have ended when
    it is raised.
    """
    if source.experts != shape.experts:
        raise BackendError(f"source with {source.experts} experts for banks with {shape.experts}")
    banks = allocate(layout, shape, device)
    size = batch_size(shape)
    batches = [range(first, min(first + size, shape.experts)) for first in range(0, shape.experts, size)]

    def load(number: int) -> None:
        experts = batches[number]
        fetch(source, range(experts.start + AHEAD, experts.stop + AHEAD))
        if isinstance(source, BatchSource) and len(experts) > 1:
            banks.fill_batch(experts, source.read_batch(experts, layout.group))
        else:
            for expert in experts:
                banks.fill(expert, read_rows(source, expert, layout.group))

    fetch(source, range(AHEAD))
    done = 0
    with closing(each(load, range(len(batches)), default_readers() if readers is None else readers)) as finished:
        for number in finished:
            done += len(batches[number])
            if progress is not None:
                progress(done, shape.experts)
    banks.require_complete()
    return banks


def batch_size(shape: BankShape) -> int:
    """Experts that are read at once, so that operations are long beside the switches between threads."""
    return max(1, min(AHEAD, BATCH_BYTES // max(1, shape.hidden * shape.intermediate // 2)))


class Counted:
    """A source that tells how many experts have been read, for whoever cannot ask the loading itself.

    `progress` is called in the threads that read, one at a time.
    """

    def __init__(self, source: WeightSource, progress: Progress) -> None:
        self.source, self.progress = source, progress
        self.done = 0
        self._lock = threading.Lock()

    @property
    def experts(self) -> int:
        return self.source.experts

    def read(self, expert: int, group: int) -> ExpertCodes:
        found = self.source.read(expert, group)
        self._count(1)
        return found

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        found = read_rows(self.source, expert, group)
        self._count(1)
        return found

    def read_batch(self, experts: range, group: int) -> ExpertRows:
        found = read_batch(self.source, experts, group)
        self._count(len(experts))
        return found

    def fetch(self, expert: int) -> None:
        fetch(self.source, range(expert, expert + 1))

    def _count(self, more: int) -> None:
        with self._lock:
            self.done += more
            self.progress(self.done, self.experts)
