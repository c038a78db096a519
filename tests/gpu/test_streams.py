"""Streams: a call runs on torch's current stream, and waits for nothing else than what that stream waits for."""

from __future__ import annotations

import threading

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits

pytestmark = pytest.mark.gpu

TIMES = 50


@pytest.fixture(scope="module")
def subject(layers):
    return layers.make()


@pytest.fixture(scope="module")
def other(layers, subject):
    """Another layer of the same sizes, with other weights."""
    return layers.layer(layers.service(subject.sizes, metadata="3-byte"), subject.sizes, number=1)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_another_stream_gives_the_same_bits(subject, tokens: int) -> None:
    """Everything of the call on a stream that is not the default one."""
    call = subject.mixed(tokens, seed=tokens)
    wanted = subject.answer(call)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = subject.answer(call)
    stream.synchronize()
    assert same_bits(found, wanted)


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_events_order_two_streams(subject, tokens: int) -> None:
    """Inputs come late on one stream, the call on a side stream waits for them, a third reader waits for the call."""
    call = subject.mixed(tokens, seed=20)
    wanted = subject.answer(call)
    late = Inputs(torch.full_like(call.x, torch.nan), torch.full_like(call.ids, -1), torch.zeros_like(call.weights))
    out, slow = torch.full_like(call.x, torch.nan), torch.ones(2048, 2048, device=subject.device)
    torch.cuda.synchronize()
    given, done, side = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Stream()
    for _ in range(8):  # the inputs stand behind this
        slow = slow @ slow * 1e-6
    for mine, theirs in ((late.x, call.x), (late.ids, call.ids), (late.weights, call.weights)):
        mine.copy_(theirs)
    given.record()
    with torch.cuda.stream(side):
        side.wait_event(given)
        subject.layer(late.x, late.ids, late.weights, out)
        done.record()
    torch.cuda.current_stream().wait_event(done)
    copy = out.clone()
    assert same_bits(copy, wanted)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_two_layers_on_two_streams(subject, other, tokens: int) -> None:
    """At the same time, many times over: each has its own scratch."""
    pairs = [(made, made.mixed(tokens, seed=30), torch.cuda.Stream()) for made in (subject, other)]
    wanted = [made.answer(call) for made, call, _ in pairs]
    shape = (TIMES, tokens, subject.sizes.hidden)
    outs = [torch.full(shape, torch.nan, dtype=torch.float16, device=subject.device) for _ in pairs]
    torch.cuda.synchronize()
    for number in range(TIMES):
        for (made, call, stream), rows in zip(pairs, outs, strict=True):
            with torch.cuda.stream(stream):
                made.layer(call.x, call.ids, call.weights, rows[number])
    torch.cuda.synchronize()
    for rows, right in zip(outs, wanted, strict=True):
        assert (rows.view(torch.int16) == right.view(torch.int16)).all()


def test_two_layers_in_two_threads(subject, other) -> None:
    """Each thread has a stream and a layer; threads that have not used the device before are no trouble."""
    jobs = [(made, made.mixed(4, seed=40), torch.cuda.Stream()) for made in (subject, other)]
    wanted = [made.answer(call) for made, call, _ in jobs]
    outs = [torch.full((TIMES, *right.shape), torch.nan, dtype=torch.float16, device=right.device) for right in wanted]
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work(made, call: Inputs, stream: torch.cuda.Stream, rows: torch.Tensor) -> None:
        try:
            with torch.cuda.stream(stream):
                for out in rows:
                    made.layer(call.x, call.ids, call.weights, out)
            stream.synchronize()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(*job, rows)) for job, rows in zip(jobs, outs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for rows, right in zip(outs, wanted, strict=True):
        assert (rows.view(torch.int16) == right.view(torch.int16)).all()
