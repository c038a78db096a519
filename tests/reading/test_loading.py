"""Loading: any number of threads gives the same banks; whatever stops it leaves nothing behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from sm70_moe.banks.banks import allocate
from sm70_moe.banks.threads import each
from sm70_moe.errors import BackendError, CheckpointError
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.numbers.codes import ExpertCodes
from sm70_moe.numbers.rows import ExpertRows
from sm70_moe.reading.loading import batch_size, prepare

SHAPE = BankShape(12, 64, 32)
LAYOUT = BankLayout("octet32", Metadata.THREE_BYTE, 32, True, True)
SOURCE = SyntheticLayer(12, 64, 32, 32)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sm70-moe-reader")]


class Watched:
    """A source that notes what is read, and by how many at once."""

    experts = SHAPE.experts

    def __init__(self, fault: BaseException | None = None, at: int = 5) -> None:
        self.fault, self.at = fault, at
        self.read_experts: list[int] = []
        self.active = self.most = 0
        self._lock = threading.Lock()

    def read(self, expert: int, group: int) -> ExpertCodes:
        with self._lock:
            self.read_experts.append(expert)
            self.active += 1
            self.most = max(self.most, self.active)
        if expert == self.at and self.fault is not None:
            raise self.fault
        codes = SOURCE.read(expert, group)
        with self._lock:
            self.active -= 1
        return codes


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_do_not_change_the_banks(threads: int) -> None:
    """Every byte is the one that a single thread writes, and no more threads read than were asked for."""
    source = Watched()
    banks, alone = (prepare(s, LAYOUT, SHAPE, "cpu", readers=n) for s, n in ((source, threads), (SOURCE, 1)))
    for found, expected in zip(banks.w13.tensors, alone.w13.tensors, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(banks.w2.tensors, alone.w2.tensors, strict=True):
        assert torch.equal(found, expected)
    assert sorted(source.read_experts) == list(range(12))
    assert source.most <= threads
    assert readers() == []


def test_row_words_are_read_where_a_source_has_them() -> None:
    """`read_rows` goes before `read`, and gives the same banks."""

    class Rows:
        experts = SHAPE.experts

        def read(self, expert: int, group: int) -> ExpertCodes:
            raise AssertionError("read_rows is there")

        def read_rows(self, expert: int, group: int) -> ExpertRows:
            return ExpertRows.of(SOURCE.read(expert, group))

    banks, plain = (prepare(source, LAYOUT, SHAPE, "cpu") for source in (Rows(), SOURCE))
    assert all(np.array_equal(banks.w2.dequantise(e), plain.w2.dequantise(e)) for e in range(12))


class Batches:
    """A source that gives several experts at once, and never one where there are more."""

    experts = SHAPE.experts

    def read(self, expert: int, group: int) -> ExpertCodes:
        raise AssertionError("read_batch is there")

    def read_batch(self, experts: range, group: int) -> ExpertRows:
        return ExpertRows.stacked([ExpertRows.of(SOURCE.read(expert, group)) for expert in experts])


@pytest.mark.parametrize("order", ["tile32x8", "octet32"])
@pytest.mark.parametrize("metadata", list(Metadata))
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_batch_writes_what_its_experts_write(
    order: str, metadata: Metadata, interleaved: bool, batched: bool
) -> None:
    """In every layout, every byte."""
    layout = BankLayout(order, metadata, 32, interleaved, batched)
    found, expected = (prepare(source, layout, SHAPE, "cpu") for source in (Batches(), SOURCE))
    for bank, other in ((found.w13, expected.w13), (found.w2, expected.w2)):
        for left, right in zip(bank.tensors, other.tensors, strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_batches_are_bounded() -> None:
    """About a MiB of codes of a matrix, at most 16 experts, at least one."""
    sizes = {(2560, 160): 5, (64, 32): 16, (4096, 14336): 1, (2048, 512): 2}
    assert {size: batch_size(BankShape(512, *size)) for size in sizes} == sizes


def test_a_batch_that_does_not_fit_is_refused() -> None:
    """Experts beyond the last, and another number of experts than was said."""
    banks, rows = allocate(LAYOUT, SHAPE, "cpu"), Batches().read_batch(range(2), 32)
    for experts, named in ((range(11, 13), "expert 12"), (range(3), "experts 0 to 2 gate")):
        with pytest.raises(BackendError, match=named):
            banks.fill_batch(experts, rows)
    assert banks.filled == set()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failure_is_told_with_its_expert(threads: int) -> None:
    """The source's own error, which names the tensor, and the expert as a note; the threads have ended."""
    source = Watched(CheckpointError("tensor layers.0.experts.5.up_proj.qzeros: changed"))
    with pytest.raises(CheckpointError, match=r"5\.up_proj\.qzeros") as error:
        prepare(source, LAYOUT, SHAPE, "cpu", readers=threads)
    assert error.value.__notes__ == ["while reading expert 5 of 12"]
    assert readers() == []
    source.fault = None
    assert prepare(source, LAYOUT, SHAPE, "cpu", readers=threads).complete


def test_an_interrupt_ends_the_threads() -> None:
    """A KeyboardInterrupt in the loading thread: no bank comes back, no thread goes on reading."""
    source = Watched()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, LAYOUT, SHAPE, "cpu", interrupt, readers=2)
    assert readers() == []
    assert source.active == 0
    assert prepare(source, LAYOUT, SHAPE, "cpu").complete


def test_closing_early_ends_the_threads() -> None:
    """Items that nobody waits for are not begun."""
    begun: list[int] = []
    running = each(begun.append, range(100_000), 2)
    next(running)
    running.close()
    assert readers() == []
    assert len(begun) < 100_000


def test_torchs_own_threads_are_put_aside_meanwhile() -> None:
    """One while anybody loads; afterwards as many as before, also in a thread that came in between."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)

    def other() -> None:
        assert list(each(lambda _: seen.append(torch.get_num_threads()), range(2), 1)) == [0, 1]
        seen.append(torch.get_num_threads())

    try:
        outer = each(lambda _: None, range(2), 1)
        next(outer)
        assert torch.get_num_threads() == 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        outer.close()
        assert torch.get_num_threads() == 3
        assert seen == [1, 1, 3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("threads", [1, 3])
def test_banks_are_made_under_any_mode_and_written_under_any_other(mode, threads: int) -> None:
    """Readers' threads have modes of their own, and a bank may be filled again later: no tensor is tied to one."""
    with mode():
        banks = prepare(SOURCE, LAYOUT, SHAPE, "cpu", readers=threads)
    assert not any(tensor.is_inference() for tensor in (*banks.w13.tensors, *banks.w2.tensors))
    alone = prepare(SOURCE, LAYOUT, SHAPE, "cpu", readers=1)
    assert all(map(torch.equal, banks.w2.tensors, alone.w2.tensors))
    banks.fill(3, SOURCE.read(3, 32))
    with torch.inference_mode():
        banks.fill(4, SOURCE.read(4, 32))
    assert all(map(torch.equal, banks.w13.tensors, alone.w13.tensors))
