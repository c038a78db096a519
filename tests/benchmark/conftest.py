"""A whole run without a GPU: a driver whose kernels are computed by the portable route, and a stopwatch that
does the work and says what the test wants."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.benchmark.place import Place
from sm70_moe.benchmark.result import Host, Result, Row, Skipped
from sm70_moe.benchmark.routing import Routing
from sm70_moe.benchmark.session import facts_of_contract, planned
from sm70_moe.benchmark.setup import Setup
from sm70_moe.benchmark.stand import Stand
from sm70_moe.kernels.build import SOURCES
from sm70_moe.kernels.build.geometry import shipped_geometries
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.build.versions import Scope, versions
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native import bound
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.launch import Launcher
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.kernels.registry import load
from sm70_moe.layout import Metadata
from sm70_moe.plan.memory import bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.testing import fake_build, fake_machine, settings
from sm70_moe.testing.driver import FakeDriver, Launched

POLICY = "sample-awq-tp2"
STREAM = 77
GPU = {"name": "fake GPU", "capability": "9.0", "multiprocessors": 4}


def tensor_at(address: float, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory of this process."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * count).from_address(int(address)), dtype=dtype).view(shape)


@dataclass
class Kernels:
    """What the kernels of `roofline`, `decode_w13` and `decode_w2` do, told from their arguments.

    `spoil` changes an output before it is left behind.
    """

    names: dict[str, list[str]]
    banks: dict[int, Banks] = field(default_factory=dict)
    spoil: Callable[[torch.Tensor], None] = lambda out: None
    last: dict[str, float] = field(default_factory=dict)
    hidden: int = 256
    top_k: int = 4

    def __call__(self, launched: Launched, memory: object) -> None:
        given = dict(zip(self.names[launched.kernel], launched.arguments, strict=True))
        if launched.kernel == "separator":
            count = int(given["count"])
            assert count <= launched.config.threads
            for source, to, dtype in (("from_ids", "ids", torch.int32), ("from_weights", "weights", torch.float32)):
                tensor_at(given[to], (count,), dtype).copy_(tensor_at(given[source], (count,), dtype))
        elif launched.kernel.startswith("fused"):
            both = given | {"top_k": self.top_k, "hidden": self.hidden}
            out = tensor_at(given["out"], (int(given["tokens"]), self.hidden), torch.float16)
            self.run(both, both, out)
            self.spoil(out)
        elif launched.kernel.startswith("w13"):
            self.last = given
            self.run(given, given, torch.empty(int(given["tokens"]), int(given["hidden"]), dtype=torch.float16))
        elif launched.kernel.startswith("w2"):
            shape = int(given["tokens"]), int(given["hidden"])
            out = tensor_at(given["out"], shape, torch.float16)
            if not self.last or self.last["intermediate"] != given["intermediate"]:
                out.fill_(1.0)  # W2 alone: what matters is that it was written
            else:
                self.run(self.last, given, out)
                self.spoil(out)

    def run(self, first: dict[str, float], second: dict[str, float], out: torch.Tensor) -> None:
        tokens, slots = int(first["tokens"]), (int(first["tokens"]), int(first["top_k"]))
        banks = self.banks[int(first["w13_words"])]
        x = tensor_at(first["x"], (tokens, int(first["hidden"])), torch.float16)
        ids = tensor_at(first["ids"], slots, torch.int32)
        weights = tensor_at(second["weights"], slots, torch.float32) if "weights" in second else torch.ones(slots)
        inner = tensor_at(first["intermediate"], (*slots, banks.shape.intermediate), torch.float16)
        LegacyBackend().run(banks, Call(x, ids, weights, out, inner))


@dataclass
class Watch:
    """Does the work, and says that it took `microseconds` a call of `elapsed`."""

    microseconds: Callable[[], float] = lambda: 960.0
    captures: int = 0
    refuses: bool = False

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nadvice for developers")
        work()
        return work

    def elapsed(self, work: Callable[[], None]) -> float:
        return self.microseconds()

    def wait(self) -> None:
        pass


@dataclass
class Rehearsal:
    """A fake GPU of an architecture, with a policy's plan on it."""

    driver: FakeDriver
    kernels: Kernels
    launcher: Launcher
    plan: Plan
    watch: Watch

    @property
    def place(self) -> Place:
        return Place(
            device="cpu",
            watch=self.watch,
            stream=lambda: STREAM,
            free=lambda: 2**33,
            facts=lambda: GPU,
            state=lambda: {"sm_mhz": 1000, "held_down_by": []},
            current=nullcontext,
            release=lambda: None,
        )

    def setup(self, metadata: str = "4-byte", banks: int = 2, launcher: Launcher | str | None = None) -> Setup:
        layout, shape = self.plan.layout, bank_shape(self.plan.admission)
        assert layout is not None
        assert shape is not None
        own = replace(layout, metadata=Metadata(metadata))
        return Setup.make(self.plan, own, shape, "cpu", banks, 0, launcher or self.launcher, lambda: STREAM)

    def stand(self, setup: Setup, tokens: int = 2, routing: str = "uniform", layers: int = 4) -> Stand:
        made = Routing.make(routing, layers, len(setup.banks), tokens, setup.top_k, setup.shape.experts)
        return Stand(setup, made)


Rehearse = Callable[..., Rehearsal]


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """rehearse("sm_90") -> Rehearsal."""

    def make(architecture: str = "sm_90", policy: str = POLICY, build: str = "fake", **variables: str) -> Rehearsal:
        manifests = load_manifests(SOURCES)
        scope = Scope((architecture,), shipped_geometries())
        contents = {version: version.name.encode() for version in versions(manifests.values(), scope)}
        (folder := tmp_path / architecture).mkdir()
        cubins = Cubins.write(folder, "fake-build", "compiler", scope, contents)
        found = {k.name: k for m in manifests.values() for k in m.kernels.values()}
        kernels = Kernels({name: [a.name for a in kernel.arguments] for name, kernel in found.items()})
        kinds = {name: [a.kind for a in kernel.arguments] for name, kernel in found.items()}
        driver = FakeDriver(kinds, compute=kernels, name=architecture)
        launcher = Launcher(cubins, manifests, 0, driver)
        monkeypatch.setattr(Launcher, "open", classmethod(lambda cls, *_, **__: launcher))
        monkeypatch.setattr(bound, "current_stream", lambda device: lambda: STREAM)
        original = Setup.make

        def known(*arguments: Any) -> Setup:
            setup = original(*arguments)
            kernels.banks |= {b.w13.planes["words"].data_ptr(): b for b in setup.banks}
            return setup

        monkeypatch.setattr(Setup, "make", staticmethod(known))
        capability = divmod(int(architecture.removeprefix("sm_")), 10)
        images = frozenset({architecture})
        held = {"qpn": images, "grouped": images, "indexed": frozenset[str]()}
        made = replace(fake_build(images=images), backends=held) if build == "fake" else build
        machine = fake_machine(capability, made)
        own = {name: NativeBackend(name) for name in ("qpn", "grouped", "indexed")}
        machine = replace(machine, backends={**load(), **own})
        found_policy = load_policy(policy)
        plan = planned(found_policy, facts_of_contract(found_policy, "cuda:0"), settings(**variables), machine)
        return Rehearsal(driver, kernels, launcher, plan, Watch())

    return make


def made_row(arm: str, microseconds: float, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "launch": "plain",
        "part": "both",
        "metadata": "4-byte",
        "tokens": 4,
        "routing": "uniform",
        "distinct": 38.8,
        "bytes": 29_798_400,
    }
    return Row.of([microseconds - 1, microseconds, microseconds + 2], arm=arm, **{**values, **changes})


ROWS = (
    made_row("separator", 1.0, bytes=0),
    made_row("floor", 2.0, bytes=0),
    made_row("roofline", 12.0, shape="t128 s1 w160"),
    made_row("roofline", 10.0, shape="t256 s1 w200"),
    made_row("roofline", 8.0, launch="dependent", shape="t256 s1 w200"),
    made_row("roofline", 6.0, part="w13", shape="t256 s1 w200"),
    made_row("ours", 15.0, verdict="right"),
    made_row("ours", 9.0, part="w13"),
    made_row("ours", 30.0, metadata="3-byte", verdict="wrong: bound fractions"),
)

RESULT = Result(
    gpu={"name": "fake GPU", "multiprocessors": 80},
    build="0123",
    policy="one",
    policy_digest="abcd",
    geometry={"hidden": 2560},
    protocol={"layers": 48, "banks": {"4-byte": 12}},
    rows=ROWS,
    skipped=(Skipped("ours", "sm_70 has no dependent launch", launch="dependent", tokens=4),),
    host=(Host(1, "4-byte", "qpn_m1", 16.3, (16.3, 17.0)),),
    extra={"state": {"before": {"sm_mhz": 1380}}},
)


@pytest.fixture
def row() -> Callable[..., Row]:
    """row("ours", 15.0) -> a row with three samples about that time."""
    return made_row


@pytest.fixture
def result() -> Result:
    """A small result with one wrong row."""
    return RESULT
