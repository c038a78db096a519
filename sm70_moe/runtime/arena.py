"""Arena: working memory of a device, lent to one call after the other.

A device's layers run in turn, on one stream or in one graph, so that a buffer serves all of them. It
is as large as the plans say for resident calls (`SM70_MOE_PERSISTENT_MAX_TOKENS`); a larger call gets
memory of torch's allocator for as long as it runs.
"""

from __future__ import annotations

import threading

import torch


class Arena:
    """Keeps the `Workspace` protocol for one device.

    Calls of layers that share an arena must not run at the same time, on two streams say: give such
    layers an arena each.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.size = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._outgrown: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Keep at least so many bytes from now on.

        A buffer that was outgrown is kept too where calls were lent it: a captured graph has its address.
        """
        with self._lock:
            if nbytes <= self.size:
                return
            if self.size and self.device.type == "cuda":
                self._outgrown.append(self._buffer)
            # not under inference_mode, where the buffer would be an inference tensor for ever
            with torch.inference_mode(False):
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.size = nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that are held, outgrown buffers too."""
        return self.size + sum(buffer.nbytes for buffer in self._outgrown)

    def lend(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes (uint8), whatever stands in them, until the call has run."""
        if nbytes <= self.size:
            return self._buffer
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
