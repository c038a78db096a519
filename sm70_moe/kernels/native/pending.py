"""Results that are worked out when somebody first asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Pending(Mapping[tuple[str, str], Result], Generic[Result]):
    """(device, backend) -> what a test or a question gives; run at the first question, kept for the next."""

    def __init__(self, tests: Mapping[tuple[str, str], Callable[[], Result]]) -> None:
        self._tests = tests
        self._results: dict[tuple[str, str], Result] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: tuple[str, str]) -> Result:
        with self._lock:
            if key not in self._results:
                self._results[key] = self._tests[key]()
            return self._results[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._tests)

    def __len__(self) -> int:
        return len(self._tests)
