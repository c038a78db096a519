"""Time of a call on its device: what tuning measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from sm70_moe.errors import BackendError

CALLS, SAMPLES = 10, 5
"""Calls that follow each other in a sample, so that the host's time hides behind the device's; and samples."""


def microseconds(run: Callable[[], None], device: torch.device) -> float:
    """Median over samples of a call's time on a CUDA device, after some that are not timed.

    Raises BackendError for another device, and while a CUDA graph is captured on the current stream.
    """
    if device.type != "cuda":
        raise BackendError(f"time on {device}: accepted is a CUDA device")
    if torch.cuda.is_current_stream_capturing():
        raise BackendError("time: a CUDA graph is being captured on this stream, accepted is a call before any capture")
    stream = torch.cuda.current_stream(device)
    for _ in range(3):
        run()
    found = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record(stream)
        for _ in range(CALLS):
            run()
        end.record(stream)
        end.synchronize()
        found.append(float(start.elapsed_time(end)) * 1e3 / CALLS)
    return statistics.median(found)
