"""Where a run takes place: a device with its stopwatch, its memory and its state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from sm70_moe.benchmark.gpu import Management, gpu_facts, gpu_state
from sm70_moe.benchmark.timing import CudaStopwatch, Stopwatch
from sm70_moe.decision import Plain


@dataclass(frozen=True, slots=True)
class Place:
    """What a run asks of a device. `stream` is the handle of torch's current stream, `free` counts bytes,
    `current` makes the device torch's current one, `release` gives back what was freed."""

    device: str
    watch: Stopwatch
    stream: Callable[[], int]
    free: Callable[[], int]
    facts: Callable[[], Mapping[str, Plain]]
    state: Callable[[], Mapping[str, Plain]]
    current: Callable[[], AbstractContextManager[None]]
    release: Callable[[], None]

    @classmethod
    def cuda(cls, device: str) -> Place:
        """A GPU of torch's."""
        import torch

        from sm70_moe.kernels.native.bound import current_stream

        whole = torch.device(device if ":" in device else f"{device}:0")
        nvml = Management.open(str(whole), torch.cuda.get_device_name(whole))
        return cls(
            device=str(whole),
            watch=CudaStopwatch(),
            stream=current_stream(whole),
            free=lambda: int(torch.cuda.mem_get_info(whole)[0]),
            facts=partial(gpu_facts, str(whole), nvml),
            state=partial(gpu_state, nvml),
            current=partial(_current, whole),
            release=_release,
        )


@contextmanager
def _current(device: object) -> Iterator[None]:
    import torch

    with torch.cuda.device(device):
        yield


def _release() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
