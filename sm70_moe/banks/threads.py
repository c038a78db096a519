"""Threads that read, pack and check: a bounded number of them, none left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

MOST_READERS = 4
"""More threads hardly read faster: they wait for the disk, or for each other's Python."""


def default_readers() -> int:
    """Threads that read: as many as this process may use processors, within bounds."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_READERS, usable)


class Serial:
    """Keeps torch from splitting single operations over threads of its own while ours run.

    Those threads wait by spinning: with one reader on two processors they took twice the time of the
    reader itself. torch keeps the number for each thread and a last one for threads to come, so
    whoever comes in sets it and sets it back on leaving. Threads that somebody else starts meanwhile
    may run on one processor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._usual = 1

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            if not self._users:  # what a thread finds later may be ours
                self._usual = torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                torch.set_num_threads(self._usual)


_SERIAL = Serial()
"""The number is global in torch, so there is one holder of it in the process."""


def each(work: Callable[[int], None], items: Iterable[int], threads: int) -> Generator[int, None, None]:
    """Do `work` for every item in that many threads, and give the items as they are done.

    The first exception ends it, and so does closing it: then every thread finishes what it is
    doing, and none is left.
    """
    waiting, done = iter(items), SimpleQueue[int | BaseException | None]()
    stop, take = threading.Event(), threading.Lock()

    def run() -> None:
        try:
            while not stop.is_set():
                with take:
                    item = next(waiting, None)
                if item is None:
                    break
                work(item)
                done.put(item)
        except BaseException as error:
            done.put(error)
        done.put(None)

    running = max(1, threads)
    readers = [threading.Thread(target=run, name=f"sm70-moe-reader-{n}") for n in range(running)]
    with _SERIAL.on(), _running(readers, stop):
        while running:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                running -= 1
            else:
                yield found


@contextmanager
def _running(threads: list[threading.Thread], stop: threading.Event) -> Iterator[None]:
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        yield
    finally:
        stop.set()
        for thread in started:
            thread.join()
