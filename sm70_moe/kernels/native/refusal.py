"""A driver that says no, told apart from kernels that compute wrongly."""

from __future__ import annotations

from sm70_moe.errors import BackendError


class LaunchRefused(BackendError):
    """The driver did not load or launch a kernel; the text is the driver's own."""


class Refusal(str):
    """The result of a self-test that the driver refused to run: the driver's own words."""

    __slots__ = ()


class Crash(str):
    """The result of a test or a question that raised what nobody expected: type and text of the error."""

    __slots__ = ()

    @classmethod
    def of(cls, error: BaseException) -> Crash:
        try:
            return cls(f"{type(error).__name__}: {error}")
        except Exception:  # an error may fail to print
            return cls(type(error).__name__)
