"""Loading: several threads read a rank's experts from a source into banks.

Each thread reads, packs and writes one expert at a time, so what exists beside the banks is one
expert's tensors a thread. An expert has its own place in the banks: the result does not depend on
the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import torch

from sm70_moe.errors import BackendError
from sm70_moe.layout import BankLayout, BankShape
from sm70_moe.weights.banks import Banks, allocate
from sm70_moe.weights.codes import ExpertCodes, WeightSource
from sm70_moe.weights.offers import fetch, read_rows
from sm70_moe.weights.readers import default_readers, each
from sm70_moe.weights.rows import ExpertRows

AHEAD = 16
"""Experts that the system is told of before they are read, so that the disk never waits for us. Measured:
with 4 the disk was idle now and then, more than 16 gained nothing."""

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
    BackendError if source and shape disagree, and what the source raises, with the expert's number
    as a note; the source can be read again after that. Whatever ends the loading, a
    KeyboardInterrupt too, the threads have ended when it is raised.
    """
    if source.experts != shape.experts:
        raise BackendError(f"source with {source.experts} experts for banks with {shape.experts}")
    banks = allocate(layout, shape, device)

    def load(expert: int) -> None:
        try:
            fetch(source, expert + AHEAD)
            banks.fill(expert, read_rows(source, expert, layout.group))
        except Exception as error:
            error.add_note(f"while loading expert {expert} of {shape.experts}")
            raise

    threads = default_readers() if readers is None else readers
    for expert in range(AHEAD):
        fetch(source, expert)
    with closing(each(load, range(shape.experts), threads)) as finished:
        for done, _ in enumerate(finished, 1):
            if progress is not None:
                progress(done, shape.experts)
    banks.require_complete()
    return banks


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
        self._count()
        return found

    def read_rows(self, expert: int, group: int) -> ExpertRows:
        found = read_rows(self.source, expert, group)
        self._count()
        return found

    def fetch(self, expert: int) -> None:
        fetch(self.source, expert)

    def _count(self) -> None:
        with self._lock:
            self.done += 1
            self.progress(self.done, self.experts)
