"""A layer bound to kernels: what is launched for a call, what is refused, what is kept and let go."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.decision import Reason
from sm70_moe.errors import BackendError
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.build.versions import Scope, versions
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.capability import Span
from sm70_moe.kernels.declared import decode
from sm70_moe.kernels.native import bound as module
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.launch import Launcher, Step
from sm70_moe.kernels.native.refusal import LaunchRefused
from sm70_moe.kernels.native.steps import Case, Pieces, Route
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.runtime.arena import Arena
from sm70_moe.testing.driver import FakeDriver, Launched

MANIFEST = """
divides = { hidden = 64 }
[kernels.w13]
arguments = ["x", "ids", "w13_words", "w13_metadata", "w13_scales", "intermediate", "tokens:i32", "top_k:i32"]
threads   = 64
[kernels.w2]
arguments = ["intermediate", "weights", "w2_words", "out", "scratch", "hidden:i32", "inner:i32", "experts:i32"]
threads   = 32
"""

KINDS = {"w13": ("ptr",) * 6 + ("i32",) * 2, "w2": ("ptr",) * 5 + ("i32",) * 3}
HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 4, 2
LAYOUT = BankLayout("tile32x8", Metadata.FOUR_BYTE, 32, True, True)
STREAM = 77


def steps(case: Case) -> tuple[Step, ...]:
    grid = (case.tokens, case.top_k)
    return Step("fake", "w13", grid=grid), Step("fake", "w2", grid=grid, dependent=case.dependent)


ROUTE = Route(steps, decode(Span(1, 8)), ("fake",), scratch=512)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(KINDS)


@pytest.fixture
def backend(tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> NativeBackend:
    """A native backend whose kernels only note that they were launched; its device is the CPU."""
    (tmp_path / "fake.toml").write_text(MANIFEST)
    manifests = load_manifests(tmp_path)
    contents = dict.fromkeys(versions(manifests.values(), scope := Scope(("sm_70",), ())), b"code")
    launcher = Launcher(Cubins.write(tmp_path, "id", "compiler", scope, contents), manifests, 0, driver)
    monkeypatch.setattr("sm70_moe.kernels.native.backend.STEPS", {"grouped": ROUTE})
    monkeypatch.setattr(module, "current_stream", lambda device: lambda: STREAM)
    made = NativeBackend("grouped")
    made._state.launchers["cpu"] = launcher
    return made


def banks_of(**changes: Any) -> Banks:
    banks = allocate(replace(LAYOUT, **changes), BankShape(EXPERTS, HIDDEN, INNER), "cpu")
    banks.filled.update(range(EXPERTS))
    return banks


def arena() -> Arena:
    """Working memory for 8 tokens of the layer."""
    made = Arena("cpu")
    made.reserve(8 * TOP_K * INNER * 2)
    return made


def call(tokens: int, top_k: int = TOP_K) -> dict[str, torch.Tensor]:
    x = torch.ones(tokens, HIDDEN, dtype=torch.float16)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    return {"x": x, "ids": ids, "weights": torch.ones(tokens, top_k), "out": torch.empty_like(x)}


def test_what_is_launched(backend: NativeBackend, driver: FakeDriver) -> None:
    """Addresses of the call and of the banks, sizes, torch's stream; planes that are not there are null."""
    banks, given = banks_of(), call(3)
    intermediate = torch.empty(3, TOP_K, INNER, dtype=torch.float16)
    backend.run(banks, Call(**given, intermediate=intermediate))
    w13, w2 = driver.launched
    at = {name: tensor.data_ptr() for name, tensor in given.items()}
    words, metadata = (banks.w13.planes[name].data_ptr() for name in ("words", "metadata"))
    assert w13.arguments == (at["x"], at["ids"], words, metadata, 0, intermediate.data_ptr(), 3, TOP_K)
    assert w2.arguments[:4] == (
        intermediate.data_ptr(),
        at["weights"],
        banks.w2.planes["words"].data_ptr(),
        at["out"],
    )
    assert w2.arguments[5:] == (HIDDEN, INNER, EXPERTS)
    assert [(launched.stream, launched.config.grid) for launched in driver.launched] == [(STREAM, (3, 2, 1))] * 2


def test_calls_follow_their_own_tensors(backend: NativeBackend, driver: FakeDriver) -> None:
    """Programs are kept by shape, addresses are not; without an export the device's workspace is used."""
    banks, space = banks_of(), arena()
    calls = [call(1), call(2), call(1)]
    for given in calls:
        backend.run(banks, Call(**given), space)
    firsts: list[Launched] = [launched for launched in driver.launched if launched.kernel == "w13"]
    assert [launched.arguments[0] for launched in firsts] == [given["x"].data_ptr() for given in calls]
    assert [launched.arguments[6] for launched in firsts] == [1, 2, 1]
    assert len({launched.arguments[5] for launched in firsts}) == 1
    assert len(driver.loaded) == 2


def test_ready_before_the_first_call(backend: NativeBackend, driver: FakeDriver, monkeypatch) -> None:
    """After `ready`, a call loads, plans and allocates nothing."""
    banks = banks_of()
    backend.ready(banks, TOP_K)
    assert driver.launched == []

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("planned or allocated during a call")

    monkeypatch.setattr(Launcher, "program", refuse)
    given, space = call(8), arena()
    monkeypatch.setattr(torch, "empty", refuse)
    backend.run(banks, Call(**given), space)
    assert len(driver.launched) == 2


def test_two_layers_share_kernels_and_workspace(backend: NativeBackend, driver: FakeDriver) -> None:
    """Each has its own banks; both write to the memory that the device lends."""
    layers, space = [banks_of(), banks_of(metadata=Metadata.THREE_BYTE)], arena()
    for banks in layers:
        backend.run(banks, Call(**call(1)), space)
    firsts = [launched.arguments for launched in driver.launched if launched.kernel == "w13"]
    assert [arguments[2] for arguments in firsts] == [banks.w13.planes["words"].data_ptr() for banks in layers]
    assert firsts[0][5] == firsts[1][5] == space.lend(1).data_ptr()
    assert len(driver.loaded) == 2


def test_a_layer_that_is_gone_is_let_go(backend: NativeBackend) -> None:
    """The backend keeps no bank alive."""
    banks = banks_of()
    backend.run(banks, Call(**call(1)))
    assert len(backend._state.bound) == 1
    del banks
    gc.collect()
    assert len(backend._state.bound) == 0


def test_a_call_beyond_the_workspace(backend: NativeBackend, driver: FakeDriver) -> None:
    """It gets memory of its own, and the workspace stays as it is."""
    banks, space = banks_of(), arena()
    for given in (call(1), call(8, 200), call(1)):
        backend.run(banks, Call(**given), space)
    inner = [launched.arguments[5] for launched in driver.launched if launched.kernel == "w13"]
    assert inner[0] == inner[2] == space.lend(1).data_ptr()
    assert inner[1] != inner[0]


def test_threads_do_not_mix_arguments(backend: NativeBackend, driver: FakeDriver) -> None:
    """Both launches of a call belong to it, whoever else calls."""
    banks = banks_of()
    backend.ready(banks, TOP_K)
    calls = [call(1) for _ in range(32)]
    threads = [threading.Thread(target=lambda given=given: backend.run(banks, Call(**given))) for given in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = list(zip(driver.launched[::2], driver.launched[1::2], strict=True))
    seen = {(w13.arguments[0], w2.arguments[3]) for w13, w2 in pairs}
    assert seen == {(given["x"].data_ptr(), given["out"].data_ptr()) for given in calls}


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    return room[1 : 1 + tensor.numel()].view(tensor.shape)


FAULTS = {
    "dtype of x": ("x", lambda given: {**given, "x": given["x"].float(), "out": given["out"].float()}),
    "dtype of ids": ("ids", lambda given: {**given, "ids": given["ids"].long()}),
    "dtype of weights": ("weights", lambda given: {**given, "weights": given["weights"].half()}),
    "shape of out": ("out", lambda given: {**given, "out": given["out"][:1]}),
    "shape of weights": ("weights", lambda given: {**given, "weights": given["weights"][:, :1]}),
    "shape of ids": ("ids", lambda given: {**given, "ids": given["ids"][0]}),
    "width of x": ("x", lambda given: {**given, "x": given["x"][:, :32].contiguous()}),
    "strides of x": ("x", lambda given: {**given, "x": given["x"].t().contiguous().t()}),
    "strides of ids": ("ids", lambda given: {**given, "ids": given["ids"].t().contiguous().t()}),
    "alignment of x": ("x", lambda given: {**given, "x": misaligned(given["x"])}),
    "alignment of out": ("out", lambda given: {**given, "out": misaligned(given["out"])}),
    "out over x": ("out", lambda given: {**given, "out": given["x"]}),
    "more tokens": ("9 tokens", lambda given: call(9)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_calls_that_are_refused(backend: NativeBackend, driver: FakeDriver, fault: str) -> None:
    """Each by name, and before anything is launched."""
    named, change = FAULTS[fault]
    with pytest.raises(BackendError, match=named):
        backend.run(banks_of(), Call(**change(call(2))))
    assert driver.launched == []


@pytest.mark.parametrize("name", ["ids", "weights"])
def test_output_over_another_input(backend: NativeBackend, name: str) -> None:
    """Whatever its dtype is."""
    given = call(2)
    room = torch.zeros(2 * HIDDEN, dtype=torch.float16)
    given["out"] = room.view(2, HIDDEN)
    given[name] = room.view(given[name].dtype)[: 2 * TOP_K].view(2, TOP_K)
    with pytest.raises(BackendError, match=f"overlaps {name}"):
        backend.run(banks_of(), Call(**given))


def test_output_in_a_bank(backend: NativeBackend) -> None:
    """A bank is never written."""
    banks, given = banks_of(), call(1)
    words = banks.w13.planes["words"]
    assert isinstance(words, torch.Tensor)
    given["out"] = words.view(torch.float16).flatten()[:HIDDEN].view(1, HIDDEN)
    with pytest.raises(BackendError, match="overlaps the weights"):
        backend.run(banks, Call(**given))


def test_banks_that_are_not_complete(backend: NativeBackend) -> None:
    """The missing expert is named, also after the layer has run."""
    banks = banks_of()
    backend.run(banks, Call(**call(1)))
    banks.filled.discard(2)
    with pytest.raises(BackendError, match="experts 2"):
        backend.run(banks, Call(**call(1)))


def test_banks_of_single_experts(backend: NativeBackend) -> None:
    """The kernels read one tensor a plane."""
    with pytest.raises(BackendError, match="per-expert"):
        backend.run(banks_of(batched=False), Call(**call(1)))


def test_sizes_that_no_kernel_takes() -> None:
    """They are a finding at admission, each with its own reason and number."""
    ability = NativeBackend("grouped").can("sm_70")
    assert ability is not None
    wrong = {"hidden": 16416, "intermediate": 96 + 8, "experts": 3, "top_k": 17}
    found = [(f.reason, f.expected, f.observed) for f in ability.size_findings(wrong)]
    assert found == [
        (Reason.INTERMEDIATE, "a multiple of 32", 104),
        (Reason.HIDDEN, "at most 16384", 16416),
        (Reason.TOP_K, "at most 16", 17),
    ]
    assert list(ability.size_findings({"hidden": 128, "intermediate": None})) == []


def test_scratch_that_is_announced(backend: NativeBackend) -> None:
    """Activations of the call, and what the kernels keep."""
    shape = BankShape(EXPERTS, HIDDEN, INNER)
    assert [backend.workspace(shape, TOP_K, tokens) for tokens in (0, 1, 8)] == [0, 1024, 1536]


def test_a_refused_launch(backend: NativeBackend, driver: FakeDriver) -> None:
    """It is the call's own error, with the driver's words."""
    driver.refuses = "CUDA_ERROR_INVALID_VALUE: invalid argument"
    with pytest.raises(LaunchRefused, match="invalid argument"):
        backend.run(banks_of(), Call(**call(1)))


def test_banks_of_a_real_layer(backend: NativeBackend, driver: FakeDriver) -> None:
    """Banks that were prepared as usual are taken as they are."""
    layer = SyntheticLayer(hidden=HIDDEN, intermediate=INNER, experts=EXPERTS, group=32)
    banks = backend.prepare(layer, LAYOUT, BankShape(EXPERTS, HIDDEN, INNER), "cpu")
    backend.run(banks, Call(**call(1)))
    assert len(driver.launched) == 2


def test_bfloat16_has_programs_of_its_own(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that declares both: each call launches the kernels of its dtype; a third dtype is refused."""
    asked: list[str] = []

    def noted(case: Case) -> tuple[Step, ...]:
        asked.append(case.dtype)
        return steps(case)

    both = Route(noted, decode(Span(1, 8), dtypes=frozenset({"float16", "bfloat16"})), ("fake",), scratch=512)
    monkeypatch.setattr("sm70_moe.kernels.native.backend.STEPS", {"grouped": both})
    banks, given = banks_of(), call(2)
    backend.run(banks, Call(**given), arena())
    wide = {name: t.to(torch.bfloat16) if t.dtype == torch.float16 else t for name, t in given.items()}
    backend.run(banks, Call(**wide), arena())
    backend.run(banks, Call(**given), arena())
    assert asked == ["float16", "bfloat16"]
    single = {name: t.float() if name in ("x", "out") else t for name, t in given.items()}
    with pytest.raises(BackendError, match="float32"):
        backend.run(banks, Call(**single), arena())


def test_tactics(backend: NativeBackend, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timed` launches one tactic and leaves the layer alone; `take` changes the calls of a bucket, and no others."""
    seen: list[tuple[int, str]] = []

    def cut(case: Case) -> tuple[Step, ...]:
        seen.append((case.tokens, case.tactic))
        return steps(case)

    pieces = Pieces(lambda shape, top_k: 100, lambda shape, top_k, tokens: 512, lambda shape, top_k, first: (9,))
    route = Route(cut, decode(Span(1)), ("fake",), pieces=pieces, tactics=lambda case: ("rule", "other"))
    banks = banks_of()
    bound = module.Bound("indexed", backend.launcher("cpu"), route, banks, False)
    assert bound.offered(16, TOP_K, "float16") == ("rule", "other")
    assert bound.offered(101, TOP_K, "float16") == ()  # such a call is run in pieces
    monkeypatch.setattr(module, "microseconds", lambda run, device: run() or 3.0)
    given = Call(**call(12))
    before = len(driver.launched)
    assert bound.timed(given, "other", None) == 3.0
    assert len(driver.launched) == before + 2
    assert seen[-1] == (12, "other")
    bound(banks, given, None)
    assert seen[-1] == (12, "rule")
    bound.take(TOP_K, {16: "other"})
    assert {(9, "other"), (16, "other")} <= set(seen)  # loaded in advance
    for tokens, tactic in ((12, "other"), (17, "rule")):
        bound(banks, Call(**call(tokens)), None)
        assert seen[-1] == (tokens, tactic)
