"""Bytes between the ranks of a group, with a deadline: who is gone and who is late is told by rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from sm70_moe.errors import RankDisagreement

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

TAG = 70
"""Of our messages between two ranks, so that an engine's own are not taken for them."""


@dataclass(slots=True)
class Wait:
    """One rank's wait for the others: who did not answer, and whether for want of time.

    `clock` counts seconds. Once the time is up the transport closes every connection, so that
    whatever fails later fails for that.
    """

    rank: int
    seconds: float
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)
    late: list[int] = field(default_factory=list)
    gone: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def passed(self) -> float:
        return self.clock() - self.start

    @property
    def left(self) -> timedelta:
        """At least a millisecond: what has arrived already is taken."""
        return timedelta(seconds=max(self.seconds - self.passed, 0.001))

    @contextmanager
    def on(self, *ranks: int) -> Iterator[None]:
        """Note an error of the transport for these ranks instead of raising it."""
        import torch.distributed as dist

        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            for rank in ranks:
                self.note(rank, (str(error) or type(error).__name__).splitlines()[0].split(". ")[0])

    def note(self, rank: int, text: str) -> None:
        if rank in self.gone or rank in self.late:
            return
        if self.passed >= self.seconds:
            self.late.append(rank)
        else:
            self.gone[rank] = f"after {self.passed:.1f} s: {text}"

    def settle(self) -> None:
        """Raise RankDisagreement if a rank did not answer."""
        texts = [f"no answer of {ranks_text(self.late)} within {self.seconds:g} s"] if self.late else []
        texts += [f"rank {rank} was lost before it answered, {text}" for rank, text in self.gone.items()]
        if texts:
            raise RankDisagreement(f"rank {self.rank}: " + "; ".join(texts))


def gather(mine: bytes, group: dist.ProcessGroup | None, seconds: float) -> list[bytes]:
    """Every rank's bytes, in order of ranks.

    Raises RankDisagreement once every rank has answered, is gone, or had its `seconds`.
    """
    import torch
    import torch.distributed as dist

    nccl = dist.get_backend(group) == "nccl"
    device, pass_on = ("cuda", collectively) if nccl else ("cpu", pairwise)
    wait = Wait(dist.get_rank(group), seconds)
    text = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    ranks = range(dist.get_world_size(group))
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    pass_on(torch.tensor([len(text)], device=device), sizes, group, wait)
    lengths = [int(size) for size in sizes]
    # a collective moves as much for each rank as for the longest
    room = [max(lengths)] * len(lengths) if nccl else lengths
    texts = [torch.zeros(length, dtype=torch.uint8, device=device) for length in room]
    padded = torch.zeros(room[wait.rank], dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    pass_on(padded, texts, group, wait)
    return [bytes(text[:length].tolist()) for text, length in zip(texts, lengths, strict=True)]


def pairwise(mine: torch.Tensor, theirs: Sequence[torch.Tensor], group: dist.ProcessGroup | None, wait: Wait) -> None:
    """Fill `theirs`, one message a pair of ranks: a rank that is gone spoils its own answer only.

    Everybody is waited for before anything is raised: who leaves early would look lost to the others.
    """
    works: list[tuple[int, dist.Work | None]] = []
    for rank, there in peers(group).items():
        with wait.on(rank):
            works += started(mine, theirs[rank], rank, there, group)
    for rank, work in works:
        if work is not None:
            with wait.on(rank):
                work.wait(wait.left)
    theirs[wait.rank].copy_(mine)
    wait.settle()


def peers(group: dist.ProcessGroup | None) -> Mapping[int, int]:
    """Rank in the group -> rank in the whole, of all but this one."""
    import torch.distributed as dist

    others = (rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group))
    return {rank: rank if group is None else dist.get_global_rank(group, rank) for rank in others}


def started(
    mine: torch.Tensor, theirs: torch.Tensor, rank: int, there: int, group: dist.ProcessGroup | None
) -> Iterator[tuple[int, dist.Work | None]]:
    """Both directions between this rank and another one."""
    import torch.distributed as dist

    yield rank, dist.irecv(theirs, there, group=group, tag=TAG)
    yield rank, dist.isend(mine, there, group=group, tag=TAG)


def collectively(mine: torch.Tensor, theirs: list[torch.Tensor], group: dist.ProcessGroup | None, wait: Wait) -> None:
    """Fill `theirs` where messages between two ranks would open connections of their own (NCCL).

    Nobody learns who is missing.
    """
    import torch.distributed as dist

    with wait.on(*peers(group)):
        work = dist.all_gather(theirs, mine, group=group, async_op=True)
        if work is not None:
            work.wait(wait.left)
    wait.settle()


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
