"""How far reading and multiplying overlap on a multiprocessor.

Blocks ask for all of their bytes at once. So those that start together get them together, and then all of them
multiply: for the resident blocks, max(bytes, issue) + serial * min(bytes, issue). The blocks that follow take the
places of those that end, each at another point of its life: a closed queue, in which as many blocks as are resident
go round between memory, issue and the wait for the first bytes. Its throughput is less than either alone could give,
and comes nearer the more blocks are resident (mean value analysis: Reiser and Lavenberg, 1980).
"""

from __future__ import annotations


def steady(blocks: float, resident: int, streamed: float, issue: float, first: float, serial: float) -> float:
    """Bytes and issue of `blocks` on a multiprocessor that holds `resident` of them."""
    together = min(1.0, resident / blocks)  # share of the blocks that start at once
    start = max(streamed, issue) * together + serial * min(streamed, issue) * together
    rest = max(0.0, blocks - resident)
    return start + rest / flow_rate(resident, streamed / blocks, issue / blocks, first) if rest else start


def flow_rate(resident: int, streamed: float, issue: float, wait: float) -> float:
    """Blocks a microsecond of a closed queue: mean value analysis for two stations and a delay."""
    queues, rate = (0.0, 0.0), 0.0
    for blocks in range(1, resident + 1):
        stays = streamed * (1 + queues[0]), issue * (1 + queues[1])
        rate = blocks / (wait + sum(stays))
        queues = rate * stays[0], rate * stays[1]
    return rate
