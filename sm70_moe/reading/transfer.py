"""Bringing several small tensors of a device to the host at once: a copy waits for everything in front of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def brought(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous tensors on the host, in the given order; those of one device in one copy."""
    every = [tensor.contiguous() for tensor in tensors]
    if not every or every[0].device.type == "cpu":
        return every
    octets = torch.cat([tensor.view(torch.uint8).flatten() for tensor in every]).cpu()
    parts = torch.split(octets, [tensor.nbytes for tensor in every])
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, every, strict=True)]
