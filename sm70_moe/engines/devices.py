"""What an engine's torch says of a device, as facts."""

from __future__ import annotations

import torch


def architecture_of(device: str) -> str | None:
    """ "sm_70" for a GPU that this process numbers so; None for anything else. Asks CUDA, not a table."""
    place = torch.device(device)
    if place.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(place)
    return f"sm_{major}{minor}"
