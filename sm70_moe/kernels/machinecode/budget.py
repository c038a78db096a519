"""The gate on machine code: what a kernel may take, declared beside it and checked on every cubin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sm70_moe.kernels.machinecode.census import Census

LIMITS: Mapping[str, int] = MappingProxyType(
    {"registers": 255, "stack": 0, "local": 0, "calls": 0, "shared": 49 * 1024, "late_loads": 0}
)
"""What every kernel keeps unless it declares otherwise: at most so many. The hardware's own limits are
255 registers, and 48 KB of static shared memory; from sm_90 on, 1 KB that the system takes is counted too."""

EXACT = ("tensor", "wide_loads", "barriers")
"""Counts that must be met exactly where they are declared."""

KEYS = (*LIMITS, *EXACT)

SPEED = ("registers", "late_loads")
"""What only costs time where it is over its budget. A build keeps it all the same; kernels for sizes that nobody
measured are used with more, since the version for any sizes is slower still."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Declared numbers, and exceptions for some versions.

    An exception applies if all words of its key are among the version's labels: its architecture, its
    `axis=value` pairs, its `size=number` pairs, and "specialised" or "runtime". Later ones win.
    """

    common: Mapping[str, int]
    exceptions: tuple[tuple[frozenset[str], Mapping[str, int]], ...]

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Budget:
        """From the manifest. Raises ValueError that names the key."""
        common = {key: value for key, value in table.items() if not isinstance(value, dict)}
        parts = {key: value for key, value in table.items() if isinstance(value, dict)}
        for where, part in {"": common, **{f"{key}.": part for key, part in parts.items()}}.items():
            for key, value in part.items():
                if key not in KEYS or type(value) is not int or value < 0:
                    raise ValueError(f"{where}{key}: found {value!r}, accepted are numbers for {', '.join(KEYS)}")
        return cls(
            MappingProxyType(common), tuple((frozenset(key.split()), MappingProxyType(p)) for key, p in parts.items())
        )

    def numbers(self, labels: Collection[str]) -> Mapping[str, int]:
        """What holds for a version with these labels."""
        numbers = {**LIMITS, **self.common}
        for words, exception in self.exceptions:
            if words <= set(labels):
                numbers |= exception
        return numbers

    def overruns(self, found: Census, labels: Collection[str]) -> tuple[str, ...]:
        """Every number that is not kept, in words; nothing if all are."""
        told: list[str] = []
        for key, budget in self.numbers(labels).items():
            actual = int(getattr(found, key))
            if key in EXACT and actual != budget:
                told.append(f"{key} {actual}, expected {budget}")
            elif key not in EXACT and actual > budget:
                told.append(f"{key} {actual}, at most {budget}")
        return tuple(told)
