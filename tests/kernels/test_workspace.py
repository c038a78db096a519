"""Working memory: what a backend states is never below what a call holds, on both of its paths."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sm70_moe.admission.admit import admit
from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.portable import experts
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.machine.machine import Machine
from sm70_moe.plan.memory import Memory
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.reading.loading import prepare
from sm70_moe.runtime.arena import Arena
from sm70_moe.runtime.making import Maker
from sm70_moe.testing import contract_facts, fake_machine, settings


class Live(TorchDispatchMode):
    """Bytes of storages that operations have made and that are still held; `peak` is the most at once."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.sizes: dict[int, int] = {}
        self.held: Counter[int] = Counter()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return found

    def see(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self.given:
            return
        if not self.held[key]:
            self.sizes[key] = tensor.untyped_storage().nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
        self.held[key] += 1
        weakref.finalize(tensor, self.lose, key)

    def lose(self, key: int) -> None:
        self.held[key] -= 1
        if not self.held[key]:
            self.now -= self.sizes[key]


@contextmanager
def counted(*given: torch.Tensor) -> Iterator[Live]:
    gc.collect()
    with Live(*given) as live:
        yield live


def test_the_count_counts() -> None:
    """Views hold their storage, given tensors cost nothing, what is dropped is free again."""
    given = torch.ones(1000)
    with counted(given) as live:
        first = torch.zeros(256)
        view = first[:4].view(2, 2)
        del first
        given.add_(1)
        assert (live.now, live.peak) == (1024, 1024)
        del view
        second = torch.zeros(64) + 1
        assert live.now == 256
        del second
    assert (live.now, live.peak) == (0, 1024)


SHAPES = [
    (SyntheticLayer(experts=4, hidden=64, intermediate=32, group=32), 2),
    (SyntheticLayer(experts=8, hidden=256, intermediate=96, group=32), 8),
    (SyntheticLayer(experts=1, hidden=512, intermediate=32, group=32), 1),
    (SyntheticLayer(experts=16, hidden=32, intermediate=512, group=32), 4),
]


def banks_of(layer: SyntheticLayer) -> Banks:
    layout = BankLayout("octet32", Metadata.THREE_BYTE, 32, interleaved=True, batched=True)
    return prepare(layer, layout, BankShape(layer.experts, layer.hidden, layer.intermediate), "cpu")


def measured(backend: LegacyBackend, banks: Banks, given: Inputs, export: bool) -> int:
    """Peak bytes of one call beyond its arguments."""
    out = torch.empty_like(given.x)
    inner = given.x.new_empty(*given.ids.shape, banks.shape.intermediate) if export else None
    tensors = [given.x, given.ids, given.weights, out, *banks.w13.tensors, *banks.w2.tensors]
    with counted(*tensors, *([inner] if inner is not None else [])) as live:
        backend.run(banks, Call(given.x, given.ids, given.weights, out, inner))
    return live.peak


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize(("layer", "top_k"), SHAPES, ids=lambda v: str(getattr(v, "hidden", v)))
def test_legacy_never_holds_more_than_it_states(
    layer: SyntheticLayer, top_k: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dtype, with an export and without, few tokens and many, in chunks and in one piece."""
    monkeypatch.setattr(experts, "on_device", lambda banks, call: path == "device")
    banks = banks_of(layer)
    for tokens, dtype, export, chunk in (
        (1, "float16", False, 256 << 20),
        (7, "bfloat16", True, 256 << 20),
        (60, "float16", True, 256 << 20),
        (60, "float32", True, 256 << 20),
        (60, "float32", False, 1 << 16),
    ):
        given = Inputs.random(tokens, top_k, hidden=layer.hidden, experts=layer.experts, dtype=dtype)
        backend = LegacyBackend(chunk_bytes=chunk)
        stated = backend.workspace(banks.shape, top_k, tokens)
        assert 0 < measured(backend, banks, given, export) <= stated, (tokens, dtype, export, chunk)


def test_legacy_does_not_state_much_more_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device a large call of the widest dtype with an export holds at least a third of what is stated."""
    monkeypatch.setattr(experts, "on_device", lambda *_: True)
    layer = SyntheticLayer(experts=2, hidden=8192, intermediate=32, group=32)
    banks, backend = banks_of(layer), LegacyBackend()
    given = Inputs.random(64, 16, hidden=8192, experts=2, dtype="float32")
    stated = backend.workspace(banks.shape, 16, 64)
    found = measured(backend, banks, given, export=True)
    assert found <= stated <= 3 * found


def test_workspace_of_no_tokens_is_none() -> None:
    """Nothing runs then."""
    shape = BankShape(8, 256, 64)
    assert LegacyBackend().workspace(shape, 4, 0) == 0
    assert [NativeBackend(name).workspace(shape, 4, 0) for name in ("qpn", "grouped")] == [0, 0]


def test_legacy_workspace_grows_up_to_its_chunks() -> None:
    """It never falls with more tokens, and is bounded: at most half a GiB at the first contract's sizes."""
    shape = BankShape(512, 2560, 160)
    sizes = [LegacyBackend().workspace(shape, 10, tokens) for tokens in (1, 8, 128, 4877, 8192, 10**6, 10**9)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == sizes[-2] < 1 << 29


@pytest.mark.parametrize(("tokens", "size"), [(1, 512), (2, 2 * 512), (8, 8 * 512), (3, 3 * 512)])
def test_native_workspace_is_the_activations(tokens: int, size: int) -> None:
    """(M, k, I) FP16 between W13 and W2; the fused kernel keeps 128 bytes more.

    In whole blocks of 512 bytes, as torch's allocator hands memory out.
    """
    shape = BankShape(8, 256, 64)
    assert NativeBackend("grouped").workspace(shape, 4, tokens) == size
    assert NativeBackend("qpn", fused=True).workspace(shape, 4, tokens) == size + 512


# ---- what a device keeps ------------------------------------------------------------------------------

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def memory_of(tokens: int, machine: Machine | None = None) -> Memory:
    operator = settings(SM70_MOE_PERSISTENT_MAX_TOKENS=str(tokens))
    memory = Plan(admit(FIRST, operator, contract_facts(FIRST), machine or native_machine())).memory
    assert memory is not None
    return memory


def native_machine() -> Machine:
    """The fakes' machine whose decode backends state what the real ones do."""
    machine = fake_machine()
    real = {name: NativeBackend(name) for name in ("qpn", "grouped", "decode", "indexed")}
    return replace(machine, backends=MappingProxyType({**machine.backends, **real}))


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_resident_tokens_size_what_a_device_keeps(tokens: int) -> None:
    """k * I * 2 bytes a token, of the longest native call up to the setting."""
    assert memory_of(tokens).resident == -(-tokens * 10 * 160 * 2 // 512) * 512


def test_resident_tokens_of_a_batch_have_scratch_too() -> None:
    """At 32 tokens: activations, a list of 320 items, sorted slots, and the slots' own results of H numbers."""
    lists = -(-(64 + 16 * 320) // 256) * 256 + -(-4 * 320 // 256) * 256
    scratch = -(-(lists + 320 * 2560 * 2) // 512) * 512
    assert memory_of(32).resident == 320 * 160 * 2 + scratch


def test_without_native_routes_nothing_is_kept() -> None:
    """The portable backend asks torch for memory, call by call."""
    assert memory_of(8, fake_machine(build="missing")).resident == 0


def test_a_call_longer_than_the_resident_count_takes_memory_of_its_own() -> None:
    """The arena lends its one buffer up to the resident size; above, each call gets another one, freed after it."""
    arena = Arena("cpu")
    arena.reserve(memory_of(4).resident)
    kept_bytes = 4 * 10 * 160 * 2  # whole blocks of 512
    assert arena.nbytes == arena.size == kept_bytes
    kept = arena.lend(memory_of(4).workspace["grouped_decode", 4])
    assert kept.data_ptr() == arena.lend(1).data_ptr()
    longer = memory_of(4).workspace["grouped_decode", 8]
    own = arena.lend(longer)
    assert longer == own.nbytes == 25_600
    assert own.data_ptr() != kept.data_ptr()
    with counted() as live:
        arena.lend(longer)
    assert (live.peak, live.now) == (longer, 0)
    assert arena.nbytes == kept_bytes


def test_an_arena_never_shrinks() -> None:
    """A second layer that needs less changes nothing, one that needs more gets more."""
    arena = Arena("cpu")
    for asked, kept in ((100, 100), (50, 100), (300, 300), (0, 300)):
        arena.reserve(asked)
        assert arena.size == kept
        assert arena.lend(asked).nbytes == kept
    assert not arena.lend(1).is_inference()


def test_layers_of_a_service_share_one_arena() -> None:
    """`explain` counts it once, so that it must exist once."""
    maker = Maker(settings(), lambda file, text: None)
    assert maker._arena(torch.device("cpu")) is maker._arena(torch.device("cpu"))


def banks_match(shape: BankShape, layout: BankLayout) -> None:
    assert sum(shape.bank_bytes(layout)) == allocate(layout, shape, "cpu").nbytes, layout.tag


ODD = [(1, 32, 32), (3, 64, 96), (2, 96, 32), (5, 32, 160), (2, 224, 64)]
NARROW = [(2, 8, 8), (1, 40, 24), (3, 72, 8), (2, 104, 56)]


@pytest.mark.parametrize("metadata", list(Metadata))
@pytest.mark.parametrize("batched", [True, False])
def test_stated_bank_bytes_are_the_banks(metadata: Metadata, batched: bool) -> None:
    """Both orders, tiles that are filled up, odd sizes and groups."""
    for experts_, hidden, inner in ODD:
        for order in ("octet32", "tile32x8"):
            for group in (8, 16, 32):
                if (order, metadata, group) == ("octet32", Metadata.TWO_AND_HALF_BYTE, 32):
                    continue  # zeros of some of these sizes are no whole loads
                layout = BankLayout(order, metadata, group, True, batched)
                banks_match(BankShape(experts_, hidden, inner), layout)
    for experts_, hidden, inner in NARROW:
        banks_match(BankShape(experts_, hidden, inner), BankLayout("tile32x8", metadata, 8, False, batched))
    for order in ("octet32", "tile32x8"):
        banks_match(BankShape(2, 128, 256), BankLayout(order, metadata, 32, True, batched))
