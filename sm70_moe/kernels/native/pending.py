"""Results that are worked out when somebody first asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from sm70_moe.kernels.native.refusal import Crash

Result = TypeVar("Result")


class Pending(Mapping[tuple[str, str], Result | Crash], Generic[Result]):
    """(device, backend) -> what a test or a question gives; run at the first question, kept for the next.

    Behind them are a driver and its bindings, or a plug-in: whatever these raise becomes a `Crash`, so
    that it stops no engine that did not ask for it. Only KeyboardInterrupt passes.
    """

    def __init__(self, tests: Mapping[tuple[str, str], Callable[[], Result]]) -> None:
        self._tests = tests
        self._results: dict[tuple[str, str], Result | Crash] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: tuple[str, str]) -> Result | Crash:
        with self._lock:
            if key not in self._results:
                self._results[key] = guarded(self._tests[key])
            return self._results[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._tests)

    def __len__(self) -> int:
        return len(self._tests)


def guarded(ask: Callable[[], Result]) -> Result | Crash:
    """What a question gives, or how it broke."""
    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Crash.of(error)
