"""Rank options that must lie below their size."""

from __future__ import annotations

from sm70_moe.errors import SettingsError


def check_ranks(*options: tuple[str, int, int]) -> None:
    """Each option is (name, rank, size); SettingsError for a rank that its size does not have."""
    for name, rank, size in options:
        if rank >= size:
            raise SettingsError(f"{name} {rank}: accepted are 0 to {size - 1}")
