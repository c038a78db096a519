"""Slots in blocks of one expert each, found on the device: no id is read on the host.

The number of blocks depends on shapes alone, so a call can be captured in a CUDA graph. Some blocks
are empty; each costs the decoding of an expert that nobody asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sm70_moe.kernels.portable.cut import most_blocks


@dataclass(frozen=True, slots=True)
class Blocks:
    """B blocks of R rows: `experts` (B,), `slots` (B, R) numbers of flat slots, `live` (B, R) bool.

    A row that is not live has some slot's number and must not be written. An empty block names the
    last expert.
    """

    experts: torch.Tensor
    slots: torch.Tensor
    live: torch.Tensor

    def __len__(self) -> int:
        return self.experts.shape[0]

    def part(self, start: int, stop: int) -> Blocks:
        """Neighbouring blocks; fewer at the end."""
        return Blocks(self.experts[start:stop], self.slots[start:stop], self.live[start:stop])


def blocks_of(ids: torch.Tensor, experts: int, rows: int) -> Blocks:
    """The valid slots of ids (M, k), `rows` at most to a block, in order of experts and then of slots."""
    flat = ids.flatten().long()
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
    keys, order = torch.sort(keys, stable=True)
    numbers = torch.arange(experts + 1, device=ids.device)
    starts = torch.searchsorted(keys, numbers)  # first sorted slot of each expert; then of the invalid ones
    counts = starts[1:] - starts[:-1]
    ends = torch.cumsum((counts + rows - 1) // rows, 0)  # blocks up to and with each expert
    block = torch.arange(most_blocks(flat.numel(), experts, rows), device=ids.device)
    expert = torch.searchsorted(ends, block, right=True).clamp(max=experts - 1)
    before = torch.where(expert > 0, ends[expert - 1], 0)
    place = starts[expert, None] + (block - before)[:, None] * rows + torch.arange(rows, device=ids.device)
    live = (block < ends[-1])[:, None] & (place < starts[expert + 1, None])
    return Blocks(expert, order[place.clamp(max=flat.numel() - 1)], live)
