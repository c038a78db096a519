"""A driver that says no, told apart from kernels that compute wrongly."""

from __future__ import annotations

from sm70_moe.errors import BackendError


class LaunchRefused(BackendError):
    """The driver did not load or launch a kernel; the text is the driver's own."""


class Refusal(str):
    """The result of a self-test that the driver refused to run: the driver's own words."""

    __slots__ = ()
