"""Layers on a GPU, made as an engine makes them: by a policy, through AdmissionService, of made-up weights."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs, Result, Trial
from sm70_moe.facts import CallFacts, LayerFacts, TensorFacts
from sm70_moe.kernels.call import Call
from sm70_moe.machine.machine import Machine
from sm70_moe.numbers.codes import ExpertCodes
from sm70_moe.plan.memory import backend
from sm70_moe.policy import Policy, load_policy
from sm70_moe.reference.arithmetic import AwqExpert, Matrix, Reference
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import settings

DEVICE = "cuda:0"
RANKS, RANK = 2, 1

FACTOR = 2.0
"""Tensor cores do not round to nearest."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A layer to be made; `intermediate` per rank, groups as in the checkpoint and as prepared.

    What is not given are the first contract's sizes, with few experts: kernels are not specialised for
    their number.
    """

    hidden: int = 2560
    intermediate: int = 160
    top_k: int = 10
    group: int = 32
    experts: int = 12


@dataclass(slots=True)
class Kept:
    """A matrix of the reference that is decoded once."""

    matrix: Matrix
    parts: dict[str, Any] = field(default_factory=dict)

    def weights(self, rows: slice, columns: slice) -> Any:
        key = f"{rows} {columns}"
        if key not in self.parts:
            self.parts[key] = self.matrix.weights(rows, columns)
        return self.parts[key]


class Weights:
    """A made-up layer's weights and its FP64 reference; experts are made once, for all layouts."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        whole = sizes.intermediate * RANKS
        self.made = SyntheticLayer(sizes.experts, sizes.hidden, whole, sizes.group, RANKS, RANK, seed)
        self.experts = sizes.experts
        self.read = cache(self.made.read)
        self.reference = Reference(cache(self.kept), sizes.experts, self.made.columns)

    read: Callable[[int, int], ExpertCodes]

    def kept(self, expert: int) -> AwqExpert:
        words = self.made.words(expert)
        return AwqExpert(Kept(words.gate), Kept(words.up), Kept(words.down))


@dataclass(frozen=True, slots=True)
class Subject:
    """A layer under test. `run` is called with x, ids, weights, out and, if it is exported, intermediate."""

    sizes: Sizes
    weights: Weights
    layer: MoELayer
    service: AdmissionService
    run: Callable[..., None]

    @property
    def device(self) -> torch.device:
        return self.layer.banks.device

    def route(self, *arguments: torch.Tensor) -> str | None:
        """What the plan says of x, ids, weights and out."""
        found = self.layer.plan.route(CallFacts(*(TensorFacts.of(tensor) for tensor in arguments)))
        return found and found.name

    def call(self, tokens: int, seed: int = 0) -> Inputs:
        """What a router sends: different experts in a row."""
        sizes = self.sizes
        return Inputs.random(
            tokens, sizes.top_k, hidden=sizes.hidden, experts=sizes.experts, seed=seed, device=str(self.device)
        )

    def mixed(self, tokens: int, seed: int = 0) -> Inputs:
        """Invalid ids, duplicates in a token, experts that tokens share, weights of both signs."""
        made, source = self.call(tokens, seed), torch.Generator().manual_seed(seed)
        few = torch.randint(0, self.sizes.experts, (5,), generator=source)
        ids = few[torch.randint(0, 5, made.ids.shape, generator=source)].int()
        wrong = torch.rand(ids.shape, generator=source)
        ids[wrong < 0.1] = -1
        ids[wrong > 0.9] = self.sizes.experts
        weights = torch.randn(ids.shape, generator=source)
        return Inputs(made.x, ids.to(self.device), weights.to(self.device))

    def answer(self, call: Inputs) -> torch.Tensor:
        """The output, on a poisoned buffer."""
        out = torch.full_like(call.x, torch.nan)
        self.run(call.x, call.ids, call.weights, out)
        return out

    def judge(self, call: Inputs, run: Callable[..., None] | None = None) -> Result:
        """Against the FP64 reference; every buffer is poisoned before."""
        intermediate = self.layer.banks.shape.intermediate
        runs = run or self.run

        def given(one: Call) -> None:
            runs(one.x, one.ids, one.weights, one.out, one.intermediate)

        trial = Trial("route", "backend", given, self.weights.reference, intermediate, factor=FACTOR)
        return trial.judge(call)


def through(
    layer: MoELayer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    intermediate: torch.Tensor | None = None,
) -> None:
    """A call of the layer; one that exports its activations goes to the planned route's backend itself."""
    if intermediate is None:
        layer(x, ids, weights, out)
        return
    route = layer.plan.route(CallFacts(*(TensorFacts.of(tensor) for tensor in (x, ids, weights, out))))
    if route is not None:
        backend(layer.plan.admission, route.backend).run(
            layer.banks, Call(x, ids, weights, out, intermediate), layer.space
        )


def policy_for(sizes: Sizes, order: str, metadata: str) -> Policy:
    """The sample's policy with other sizes, bank order and metadata, for any architecture."""
    document = tomllib.loads(Path(load_policy("sample-awq-tp2").origin).read_text(encoding="utf-8"))
    contract = document["contract"]
    del contract["architectures"]
    contract |= {"hidden": sizes.hidden, "intermediate": sizes.intermediate}
    contract |= {"experts": sizes.experts, "top_k": sizes.top_k}
    contract["weights"] |= {"checkpoint_group": sizes.group, "prepared_group": sizes.group}
    if metadata == "4-byte":
        del document["features"]["compact_metadata"]
    else:
        document["features"]["compact_metadata"]["metadata"] = metadata
    for route in document["route"]:
        route["order"] = order
        if route["name"] == "qpn_m1":
            slots = [1, sizes.top_k]
            route["call"] |= {"x_shape": [1, sizes.hidden], "ids_shape": slots, "weights_shape": slots}
    return Policy.read(document, "tests/gpu")


@dataclass(slots=True)
class Layers:
    """Makes layers. The machine is probed once with dependent launch and once without, so that
    self-tests run once; a layer has a service of its own, since a capture closes it. Kernels are the
    build's own, whether or not there is a compiler, but for BF16, which no build has."""

    kept: dict[tuple[Sizes, int], Weights] = field(default_factory=dict)
    made: dict[tuple[Sizes, str, str, bool], Subject] = field(default_factory=dict)
    machines: dict[bool, Machine] = field(default_factory=dict)

    def machine(self, dependent: bool = True) -> Machine:
        if dependent not in self.machines:
            asked = settings(SM70_MOE_DEPENDENT_LAUNCH=str(int(dependent)), SM70_MOE_KERNEL_CACHE="0")
            self.machines[dependent] = AdmissionService(asked).machine
        return self.machines[dependent]

    def weights(self, sizes: Sizes, seed: int = 0) -> Weights:
        return self.kept.setdefault((sizes, seed), Weights(sizes, seed))

    def service(
        self,
        sizes: Sizes,
        order: str = "octet32",
        metadata: str = "4-byte",
        machine: Machine | None = None,
        flag: str | None = "1",
        **variables: str,
    ) -> AdmissionService:
        """By default with the native routes required, so that whatever stops them is an error with all reasons."""
        flags = {} if flag is None else {"qpn_m1": flag, "grouped_decode": flag}
        asked = settings(flags, **variables)
        return AdmissionService(asked, policy=policy_for(sizes, order, metadata), machine=machine or self.machine())

    def facts(self, service: AdmissionService, number: int = 0) -> LayerFacts:
        name = f"model.layers.{number}.mlp.experts"
        return contract_facts(service.policies[0], name, index=number, tensor_rank=RANK, device="cuda:0")

    def layer(self, service: AdmissionService, sizes: Sizes, number: int = 0) -> Subject:
        """One more layer of a service; its number is also its weights' seed."""
        weights = self.weights(sizes, number)
        layer = service.layer(self.facts(service, number), weights, device=DEVICE)
        return Subject(sizes, weights, layer, service, partial(through, layer))

    def make(
        self, *, order: str = "octet32", metadata: str = "4-byte", dependent: bool = True, **sizes: int
    ) -> Subject:
        """A layer with a service of its own; the same one when it is asked for again."""
        found = Sizes(**sizes)
        key = (found, order, metadata, dependent)
        if key not in self.made:
            self.made[key] = self.layer(self.service(found, order, metadata, self.machine(dependent)), found)
        return self.made[key]

    def in_bfloat16(self, **sizes: int) -> Subject | str:
        """A layer whose engine runs BF16, with a shipped policy; text says why it has no native route."""
        found, service = Sizes(**sizes), AdmissionService(settings())
        facts = replace(self.facts(self.service(found, flag=None)), activations="bfloat16")
        decision = service.admit(facts).admission.decision("native_decode")
        if not decision.admitted:
            return "; ".join(f"{finding.check}: {finding.hint or finding.observed}" for finding in decision.obstacles)
        weights = self.weights(found)
        layer = service.layer(facts, weights, device=DEVICE)
        return Subject(found, weights, layer, service, partial(through, layer))


@pytest.fixture(scope="session")
def layers(request: pytest.FixtureRequest) -> Layers:
    """What makes layers. Without a native build there is nothing to test, which `--gpu=require` does not accept."""
    made = Layers()
    if made.machine().build is None:
        missing = pytest.fail if request.config.getoption("--gpu") == "require" else pytest.skip
        missing("this installation has no native build")
    return made


SEEN = pytest.StashKey[dict[str, list[Result]]]()
"""Results by a label, for the summary at the end of a run."""


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Callable[[str, Result], None]:
    """`note(label, result)`: the summary shows the largest bound fractions of each label."""
    seen = request.config.stash.setdefault(SEEN, {})
    return lambda label, result: seen.setdefault(label, []).append(result)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What docs/evidence.md states: the largest bound fractions that were seen."""
    seen = config.stash.get(SEEN, {})
    if seen:
        terminalreporter.section("largest bound fractions: W13, W2, sum over the slots")
    for label, results in seen.items():
        fractions = "  ".join(f"{max(getattr(r, name) for r in results):.3f}" for name in ("w13", "w2", "out"))
        terminalreporter.write_line(f"{fractions}  {label}, {len(results)} calls")


@pytest.fixture(scope="session")
def graph_of() -> Callable[[Callable[[], object]], torch.cuda.CUDAGraph]:
    """Captures what a function launches, after one call on a side stream."""

    def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    return capture


@pytest.fixture(scope="session")
def routes_of() -> Callable[[MoELayer], Any]:
    """`with routes_of(layer) as taken`: the routes that the layer's calls take meanwhile, one after the other."""

    @contextmanager
    def noted(layer: MoELayer) -> Iterator[list[str]]:
        taken: list[str] = []
        plain = dict(layer.runs)

        def noting(name: str, *arguments: Any) -> None:
            taken.append(name)
            plain[name](*arguments)

        layer.runs.update({name: partial(noting, name) for name in plain})
        try:
            yield taken
        finally:
            layer.runs.update(plain)

    return noted


@pytest.fixture(scope="session")
def move() -> Callable[[Inputs, Inputs], None]:
    """`move(call, to)`: the numbers of a call into the buffers of another."""

    def copy(call: Inputs, to: Inputs) -> None:
        for mine, theirs in ((to.x, call.x), (to.ids, call.ids), (to.weights, call.weights)):
            mine.copy_(theirs)

    return copy
