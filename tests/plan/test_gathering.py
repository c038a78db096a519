"""Bytes between ranks, the transport pretended: what is sent to whom, and what is told of who is gone or late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sm70_moe.errors import RankDisagreement
from sm70_moe.plan.gathering import TAG, Wait, gather, peers

GROUP: Any = object()


class Transport:
    """Three ranks, of which this is number 1; the others' answers by rank. A group's rank n is n + 10 in the whole."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[int, bytes], group: Any = None) -> None:
        self.answers, self.group, self.sent, self.asked = answers, group, [], []
        self.received: dict[int, int] = {}
        for name, value in {
            "get_backend": lambda group: self.of(group, "gloo"),
            "get_rank": lambda group: self.of(group, 1),
            "get_world_size": lambda group: self.of(group, 3),
            "get_global_rank": lambda group, rank: self.of(group, rank + 10),
            "irecv": self.irecv,
            "isend": self.isend,
        }.items():
            monkeypatch.setattr(dist, name, value)

    def of(self, group: Any, answer: Any) -> Any:
        assert group is self.group
        return answer

    def irecv(self, tensor: torch.Tensor, there: int, group: Any, tag: int) -> None:
        assert tag == TAG
        self.asked.append((there, group))
        times = self.received[there] = self.received.get(there, 0) + 1
        answer = self.answers[there]
        if times == 1:
            assert (tensor.dtype, tensor.shape) == (torch.int64, (1,))
            tensor.fill_(len(answer))
        else:
            assert (tensor.dtype, tensor.shape) == (torch.uint8, (len(answer),))
            tensor.copy_(torch.tensor(list(answer), dtype=torch.uint8))

    def isend(self, tensor: torch.Tensor, there: int, group: Any, tag: int) -> None:
        assert tag == TAG
        self.sent.append((there, group, tensor.dtype, tensor.tolist()))


@pytest.mark.parametrize(("group", "first", "last"), [(None, 0, 2), (GROUP, 10, 12)])
def test_everybody_gets_everything(group: Any, first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths first, then texts of their own lengths, to each other rank by its number in the whole."""
    transport = Transport(monkeypatch, {first: b"longer", last: b"x"}, group)
    assert gather(b"own", group, 5.0) == [b"longer", b"own", b"x"]
    text = [ord(letter) for letter in "own"]
    assert transport.sent == [
        (there, group, dtype, content)
        for dtype, content in ((torch.int64, [3]), (torch.uint8, text))
        for there in (first, last)
    ]
    assert transport.asked == [(first, group), (last, group)] * 2


def test_peers_are_all_but_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the whole they have their own numbers."""
    Transport(monkeypatch, {})
    assert peers(None) == {0: 0, 2: 2}
    Transport(monkeypatch, {}, GROUP)
    assert peers(GROUP) == {0: 10, 2: 12}


def test_who_is_gone_and_who_is_late() -> None:
    """Before the time is up a fault is a lost rank, with its text; afterwards ranks are late; each is told once."""
    now = [100.0]
    wait = Wait(0, 5.0, clock=lambda: now[0])
    now[0] = 102.0
    with wait.on(3):
        raise RuntimeError("Connection closed. More words\nand lines")
    assert wait.left.total_seconds() == 3.0
    now[0] = 106.0
    assert wait.left.total_seconds() == 0.001
    with wait.on(1, 2, 3):
        raise RuntimeError("too late")
    assert (wait.late, wait.gone) == ([1, 2], {3: "after 2.0 s: Connection closed"})
    with pytest.raises(RankDisagreement) as caught:
        wait.settle()
    assert str(caught.value) == (
        "rank 0: no answer of ranks 1, 2 within 5 s; rank 3 was lost before it answered, after 2.0 s: Connection closed"
    )


def test_only_the_lost_and_nobody() -> None:
    """One of the two kinds alone; a wait that nobody spoiled raises nothing."""
    wait = Wait(2, 60.0, clock=lambda: 7.0)
    wait.settle()
    with wait.on(0):
        raise RuntimeError
    with pytest.raises(
        RankDisagreement, match=r"^rank 2: rank 0 was lost before it answered, after 0\.0 s: RuntimeError$"
    ):
        wait.settle()


def test_an_error_of_ones_own_is_not_the_transports() -> None:
    """A mistake is raised as it is."""
    wait = Wait(0, 1.0, clock=lambda: 7.0)
    with pytest.raises(KeyError), wait.on(1):
        raise KeyError("x")
    assert (wait.late, wait.gone) == ([], {})
