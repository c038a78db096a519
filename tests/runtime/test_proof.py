"""Proof at load: kernels that do not compute what the layer's own weights say are not kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from sm70_moe.banks.banks import Banks, allocate
from sm70_moe.banks.cache import BankCache
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.decision import Outcome, Reason
from sm70_moe.errors import AdmissionRefused, BackendError
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.build import specialiser as specialiser_module
from sm70_moe.kernels.build.images import RUN_TIME, SPECIALISED
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import capability
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.kernels.protocol import Broken
from sm70_moe.numbers.codes import WeightSource
from sm70_moe.numbers.formats import AWQ, COMPRESSED, GPTQ_V1, GPTQ_V2, Format
from sm70_moe.numbers.rows import ExpertRows, Rows
from sm70_moe.policy import parse_policy
from sm70_moe.reading.loading import prepare
from sm70_moe.reading.offers import read_columns
from sm70_moe.reading.source import CheckpointSource, TensorSource
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.preparation import key_of
from sm70_moe.runtime.proof import Proof
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.runtime.subject import chosen, word
from sm70_moe.testing import FakeNative, fake_machine, settings

POLICY = parse_policy(
    """
schema = 1
name = "proof"
revision = 1
summary = "Native routes for any layer"

[contract]
weights = { bits = 4 }

[features.single]
kind = "route"
native = true
doc = "One token."

[features.several]
kind = "route"
native = true
doc = "Two to eight."

[[route]]
name = "single"
feature = "single"
backend = "qpn"
order = "octet32"
tokens = 1

[[route]]
name = "several"
feature = "several"
backend = "grouped"
order = "octet32"
tokens = [2, 8]

[[route]]
name = "legacy"
backend = "legacy"
order = "octet32"
""",
    "PROOF",
)
LAYER = SyntheticLayer(experts=6, hidden=128, intermediate=64, group=32, seed=3)
OTHER = replace(LAYER, seed=4)
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Planted(FakeNative):
    """A native backend with a fault: it runs other banks, or another call, than it was given."""

    banks: Callable[[Banks], Banks] = lambda banks: banks
    spoil: Callable[[Call], None] = lambda call: None
    ability: Capability | None = None
    ran: list[int] = field(default_factory=list, compare=False)

    def can(self, architecture: str | None) -> Capability | None:
        return self.ability or super().can(architecture)

    def run(self, banks: Banks, call: Call, space: Any = None) -> None:
        self.ran.append(call.tokens)
        self.portable.run(self.banks(banks), call, space)
        self.spoil(call)


def facts_of(source: SyntheticLayer, **changes: Any) -> LayerFacts:
    sizes = {"hidden": source.hidden, "intermediate": source.intermediate, "experts": source.experts, "top_k": 3}
    form = {"format": "awq", "packing": "gemm", "bits": 4, "zero_point": True, "checkpoint_group": source.group}
    kind = {"activation": "silu", "gated": True, "bias": False, "router_weight_on_input": False}
    ranks = {"tensor_parallel": source.ranks, "tensor_rank": source.rank, "expert_parallel": 1, "expert_rank": 0}
    place = {"layer": "model.layers.1.mlp.experts", "index": 1, "device": "cuda:0", "activations": "float16"}
    return LayerFacts(**{**sizes, **form, **kind, **ranks, **place, **changes})  # type: ignore[arg-type]  # mixed


def service_of(
    grouped: dict[str, Any] | None = None, flags: dict[str, str] | None = None, **variables: str
) -> tuple[AdmissionService, dict[str, Planted]]:
    """A service whose native backends are fakes, `grouped` with a fault."""
    machine = fake_machine()
    portable = machine.backends["legacy"]
    assert not isinstance(portable, Broken)
    fakes = {"qpn": Planted("qpn", portable), "grouped": Planted("grouped", portable, **(grouped or {}))}
    machine = replace(machine, backends=MappingProxyType({**machine.backends, **fakes}))
    return AdmissionService(settings(flags, **variables), policy=POLICY, machine=machine), fakes


def inputs(tokens: int, facts: LayerFacts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    assert facts.experts
    assert facts.hidden
    assert facts.top_k
    ids = torch.randint(0, facts.experts, (tokens, facts.top_k), generator=random, dtype=torch.int32)
    dtype = getattr(torch, facts.activations or "float16")
    return torch.randn(tokens, facts.hidden, generator=random).to(dtype), ids, torch.rand(ids.shape, generator=random)


def right(source: WeightSource, facts: LayerFacts) -> MoELayer:
    """The same layer without native routes."""
    service, _ = service_of(flags={"single": "0", "several": "0"})
    return service.layer(facts, source, device="cpu")


# ---- faults that a backend may have --------------------------------------------------------------


def remade(edit: Callable[[ExpertRows], ExpertRows]) -> Callable[[Banks], Banks]:
    """The same banks with every expert's rows changed."""

    def make(banks: Banks) -> Banks:
        found = allocate(banks.layout, banks.shape, banks.device)
        for expert in range(banks.shape.experts):
            found.fill(expert, edit(banks.take(expert)))
        return found

    return make


def of_matrices(edit: Callable[[Rows], Rows]) -> Callable[[Banks], Banks]:
    return remade(lambda rows: ExpertRows(edit(rows.gate), edit(rows.up), edit(rows.down)))


def swapped(rows: ExpertRows) -> ExpertRows:
    return ExpertRows(rows.up, rows.gate, rows.down)


def one_more(rows: Rows) -> Rows:
    """Zeros that are one too high, as a reader of the other GPTQ version has them."""
    return Rows(rows.words, (rows.zeros + 1) % 16, rows.scales)


def wider(rows: Rows) -> Rows:
    """Scales and zeros of groups twice as long."""
    first = torch.arange(len(rows.scales)) // 2 * 2
    return Rows(rows.words, rows.zeros[first], rows.scales[first])


def only_down(rows: ExpertRows) -> ExpertRows:
    return ExpertRows(rows.gate, rows.up, wider(rows.down))


def other_columns(banks: Banks) -> Banks:
    """Interleaved banks that are read as gate-up."""
    return replace(banks, layout=replace(banks.layout, interleaved=not banks.layout.interleaved))


def other_layer(banks: Banks) -> Banks:
    return prepare(OTHER, banks.layout, banks.shape, "cpu")


def next_expert(banks: Banks) -> Banks:
    """The bank of the expert behind."""
    found = allocate(banks.layout, banks.shape, banks.device)
    for expert in range(banks.shape.experts):
        found.fill(expert, banks.take((expert + 1) % banks.shape.experts))
    return found


def not_a_number(call: Call) -> None:
    call.out.fill_(nan)


def one_column_lost(call: Call) -> None:
    """One column of the output that nobody wrote, in the last row."""
    call.out[-1, 77] = nan


def an_activation_lost(call: Call) -> None:
    """One activation is NaN, and so is all that W2 makes of it: as the reference would, given that activation."""
    if call.intermediate is not None:
        call.intermediate[0, 0, 3] = nan
        call.out[0] = nan


def wrong_at_eight(call: Call) -> None:
    if call.tokens == 8:
        call.out[5] *= 1.5


def weight_forgotten(call: Call) -> None:
    call.out /= call.weights.sum(1, keepdim=True)


def raises(call: Call) -> None:
    raise ZeroDivisionError("no lanes")


def leaves(call: Call) -> None:
    raise SystemExit(3)


FAULTS: dict[str, dict[str, Any]] = {
    "gate and up swapped": {"banks": remade(swapped)},
    "other interleave": {"banks": other_columns},
    "wrong group": {"banks": of_matrices(wider)},
    "wrong group of W2": {"banks": remade(only_down)},
    "wrong zero": {"banks": of_matrices(one_more)},
    "another layer's bank": {"banks": other_layer},
    "another expert": {"banks": next_expert},
    "writes NaN": {"spoil": not_a_number},
    "a column not written": {"spoil": one_column_lost},
    "an activation not written": {"spoil": an_activation_lost},
    "wrong at 8 tokens only": {"spoil": wrong_at_eight},
    "router weights forgotten": {"spoil": weight_forgotten},
}
RAISED = {
    "raises": ({"spoil": raises}, "ZeroDivisionError: no lanes"),
    "leaves": ({"spoil": leaves}, "SystemExit: 3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_route_falls_back_and_the_output_is_right(fault: str) -> None:
    """The finding has its numbers, the other native route stays, and every call has the portable route's bits."""
    facts = facts_of(LAYER)
    service, _ = service_of(FAULTS[fault])
    with capture_logs() as events:
        layer = service.layer(facts, LAYER, device="cpu")
    decision = layer.plan.admission.decision("several")
    assert decision.outcome is Outcome.FELL_BACK
    (finding,) = decision.obstacles
    assert (finding.check, finding.reason) == ("proof", Reason.PROOF_FAILED)
    assert finding.expected == "at most 1 of the bound"
    assert [route.name for route in layer.plan.routes] == ["single", "legacy"]
    (told,) = [event for event in events if event["event"] == "moe proof"]
    assert (told["route"], told["tokens"], told["layer"]) == ("several", [2, 8], facts.layer)
    fractions = [inf if told[name] == "inf" else float(told[name]) for name in ("w13", "out")]
    assert max(fractions) > 10
    usual = right(LAYER, facts)
    for tokens in (1, 2, 5, 8, 9):
        assert torch.equal(layer(*inputs(tokens, facts)), usual(*inputs(tokens, facts)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_route_that_is_required_is_refused(fault: str) -> None:
    """Under 1 there is no layer, and the weights are still there for another try."""
    service, _ = service_of(FAULTS[fault], {"several": "1"})
    with pytest.raises(AdmissionRefused) as caught:
        service.layer(facts_of(LAYER), LAYER, device="cpu")
    (refused,) = [decision for decision in caught.value.decisions if decision.outcome is Outcome.REFUSED]
    assert (refused.feature, refused.reasons) == ("several", (Reason.PROOF_FAILED,))
    assert service.plans() == ()


@pytest.mark.parametrize("fault", RAISED)
def test_what_a_backend_raises_is_the_findings_text(fault: str) -> None:
    """A fault of foreign code stops nobody who did not ask for it."""
    planted, text = RAISED[fault]
    service, _ = service_of(planted)
    decision = service.layer(facts_of(LAYER), LAYER, device="cpu").plan.admission.decision("several")
    assert [(f.reason, f.observed) for f in decision.obstacles] == [(Reason.PROOF_FAILED, text)]
    service, _ = service_of(planted, {"several": "1"})
    with pytest.raises(AdmissionRefused, match=text):
        service.layer(facts_of(LAYER), LAYER, device="cpu")


def test_the_number_of_versions_is_foreign_too() -> None:
    """A backend whose `version` raises is like one whose `run` does."""

    class Odd(Planted):
        def version(self, *_: object) -> object:
            raise KeyError("sm_70")

    service, _ = service_of()
    portable = service.machine.backends["legacy"]
    assert not isinstance(portable, Broken)
    backends = MappingProxyType({**service.machine.backends, "grouped": Odd("grouped", portable)})
    service = AdmissionService(settings(), policy=POLICY, machine=replace(service.machine, backends=backends))
    decision = service.layer(facts_of(LAYER), LAYER, device="cpu").plan.admission.decision("several")
    assert [(f.reason, f.observed) for f in decision.obstacles] == [(Reason.PROOF_FAILED, "KeyError: 'sm_70'")]


def test_every_version_is_tried() -> None:
    """The first token count and the last of each version: one that is wrong in between is seen."""

    class Versions(Planted):
        def version(self, banks: Banks, top_k: int, tokens: int) -> object:
            return "small" if tokens <= 4 else "large" if tokens <= 6 else "largest"

    def wrong_at_six(call: Call) -> None:
        call.out[0] *= 1.5 if call.tokens == 6 else 1

    service, _ = service_of()
    portable = service.machine.backends["legacy"]
    assert not isinstance(portable, Broken)
    odd = Versions("grouped", portable, spoil=wrong_at_six)
    backends = MappingProxyType({**service.machine.backends, "grouped": odd})
    service = AdmissionService(settings(), policy=POLICY, machine=replace(service.machine, backends=backends))
    layer = service.layer(facts_of(LAYER), LAYER, device="cpu")
    assert odd.ran == [2, 4, 6, 8]
    assert layer.plan.admission.decision("several").reasons == (Reason.PROOF_FAILED,)


def alike(number: int) -> LayerFacts:
    return facts_of(LAYER, layer=f"model.layers.{number}.mlp.experts", index=number)


def test_layers_that_are_alike_are_tried_with_one_call_each_in_turn() -> None:
    """The first one with every version; the record says so, once."""
    service, fakes = service_of()
    runs = []
    with capture_logs() as events:
        for number in range(5):
            before = [len(fake.ran) for fake in fakes.values()]
            service.layer(alike(number), replace(LAYER, seed=number), device="cpu")
            runs.append([fake.ran[n:] for fake, n in zip(fakes.values(), before, strict=True)])
        service.summary()
        service.close()
    assert runs == [[[1], [2, 8]], [[], [2]], [[], [8]], [[1], []], [[], [2]]]
    (proven,) = [event for event in events if event["event"] == "moe proven"]
    assert (proven["layers"], proven["whole"]) == (5, 1)
    assert "4 that are alike" in proven["text"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_wrong_banks_of_a_later_layer_are_seen_whatever_its_turn(number: int) -> None:
    """Every route is judged then: the banks are at fault, so that layer keeps none, and the others keep theirs."""
    service, _ = service_of()
    spoilt = {"now": False}
    portable = service.machine.backends["legacy"]
    assert not isinstance(portable, Broken)

    def given(banks: Banks) -> Banks:
        return other_layer(banks) if spoilt["now"] else banks

    fakes = {name: Planted(name, portable, banks=given) for name in ("qpn", "grouped")}
    backends = MappingProxyType({**service.machine.backends, **fakes})
    service = AdmissionService(settings(), policy=POLICY, machine=replace(service.machine, backends=backends))
    for index in range(5):
        spoilt["now"] = index == number
        routes = [route.name for route in service.layer(alike(index), LAYER, device="cpu").plan.routes]
        assert routes == (["legacy"] if index == number else ["single", "several", "legacy"])


def test_a_layer_of_another_kind_is_tried_with_every_version() -> None:
    """Other sizes, or other routes, are another plan."""
    service, fakes = service_of()
    service.layer(alike(0), LAYER, device="cpu")
    wide = replace(LAYER, intermediate=128)
    service.layer(facts_of(wide, layer="model.layers.7.mlp.experts", index=7), wide, device="cpu")
    assert fakes["grouped"].ran == [2, 8, 2, 8]
    assert fakes["qpn"].ran == [1, 1]


def test_a_route_that_failed_once_never_comes_back() -> None:
    """The second plan fails with another route; the first one's finding holds on."""
    runs: list[int] = []

    def wrong_at_second_try(call: Call) -> None:
        runs.append(call.tokens)
        if runs.count(2) > 1:
            call.out.zero_()

    service, fakes = service_of({"spoil": wrong_at_second_try})
    portable = fakes["qpn"].portable
    single = Planted("qpn", portable, spoil=not_a_number)
    machine = replace(service.machine, backends=MappingProxyType({**service.machine.backends, "qpn": single}))
    service = AdmissionService(settings(), policy=POLICY, machine=machine)
    layer = service.layer(facts_of(LAYER), LAYER, device="cpu")
    assert [route.name for route in layer.plan.routes] == ["legacy"]
    for name in ("single", "several"):
        assert layer.plan.admission.decision(name).reasons == (Reason.PROOF_FAILED,)
    assert single.ran == [1]
    assert runs == [2, 8, 2, 8]


# ---- a file of the cache ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A synthetic layer that says whose weights it has."""

    layer: SyntheticLayer = LAYER
    digest: str = "made up"

    @property
    def experts(self) -> int:
        return self.layer.experts

    def read(self, expert: int, group: int) -> Any:
        return self.layer.read(expert, group)


def spoilt_file(folder: Path, edit: Callable[[Banks], Banks]) -> Path:
    """A prepared file with the right names and checksums, and wrong weights."""
    service, _ = service_of(SM70_MOE_CACHE=str(folder))
    plan = service.layer(facts_of(LAYER), Named(), device="cpu").plan
    key, cache = key_of(plan, Named()), BankCache(folder)
    assert key is not None
    banks = cache.load(key, "cpu").banks
    assert banks is not None
    return cache.store(key, edit(banks))


@pytest.mark.parametrize("flags", [{}, {"several": "1"}], ids=["auto", "required"])
@pytest.mark.parametrize("fault", ["gate and up swapped", "wrong group", "wrong zero", "another expert"])
def test_a_wrong_file_of_the_cache_is_told_and_made_anew(fault: str, flags: dict[str, str], tmp_path: Path) -> None:
    """The file is wrong and not the kernels: banks come from the weights again, and every route is kept."""
    path = spoilt_file(tmp_path, FAULTS[fault]["banks"])
    wrong = path.read_bytes()
    service, _ = service_of(flags=flags, SM70_MOE_CACHE=str(tmp_path))
    with capture_logs() as events:
        layer = service.layer(facts_of(LAYER), Named(), device="cpu")
    assert [route.name for route in layer.plan.routes] == ["single", "several", "legacy"]
    usual = right(LAYER, facts_of(LAYER))
    for tokens in (1, 2, 8, 9):
        assert torch.equal(layer(*inputs(tokens, facts_of(LAYER))), usual(*inputs(tokens, facts_of(LAYER))))
    (warning,) = [event["text"] for event in events if event["event"] == "moe cache"]
    assert warning.startswith(f"{path}: not used, wrong on the layer's own weights")
    assert path.read_bytes() != wrong


def test_a_wrong_kernel_on_a_right_file_is_the_kernels_fault(tmp_path: Path) -> None:
    """With banks out of the file and out of the weights alike it fails: the route falls back."""
    service, _ = service_of(SM70_MOE_CACHE=str(tmp_path))
    service.layer(facts_of(LAYER), Named(), device="cpu")
    service, fakes = service_of(FAULTS["wrong zero"], SM70_MOE_CACHE=str(tmp_path))
    layer = service.layer(facts_of(LAYER), Named(), device="cpu")
    assert [route.name for route in layer.plan.routes] == ["single", "legacy"]
    assert layer.plan.admission.decision("several").reasons == (Reason.PROOF_FAILED,)
    assert fakes["grouped"].ran == [2, 8, 2, 8]


# ---- right layers -----------------------------------------------------------------------------------


def test_without_the_proof_nothing_is_tried() -> None:
    """SM70_MOE_PROOF=0 leaves it out: no call before the first one, and a wrong route is kept."""
    service, fakes = service_of(FAULTS["wrong zero"], SM70_MOE_PROOF="0")
    layer = service.layer(facts_of(LAYER), LAYER, device="cpu")
    assert fakes["qpn"].ran == fakes["grouped"].ran == []
    assert [route.name for route in layer.plan.routes] == ["single", "several", "legacy"]
    service, fakes = service_of()
    service.layer(facts_of(LAYER), LAYER, device="cpu")
    assert (fakes["qpn"].ran, fakes["grouped"].ran) == ([1], [2, 8])


def test_a_layer_without_native_routes_reads_nothing_twice() -> None:
    """No route to prove, no columns read."""

    read_again: list[int] = []

    class Counted(Named):
        def read_columns(self, expert: int, *columns: Any) -> Any:
            read_again.append(expert)
            return read_columns(self.layer, expert, *columns)

    service, _ = service_of(flags={"single": "0", "several": "0"})
    service.layer(facts_of(LAYER), Counted(), device="cpu")
    assert read_again == []
    service, _ = service_of()
    service.layer(facts_of(LAYER), Counted(), device="cpu")
    assert read_again == list(chosen(6, 1))


def proven(source: WeightSource, facts: LayerFacts, **grouped: Any) -> list[str]:
    """Names of the routes that are left of a layer with right kernels."""
    service, fakes = service_of(grouped)
    with capture_logs() as events:
        layer = service.layer(facts, source, device="cpu")
    assert [event for event in events if event["event"] == "moe proof"] == []
    assert fakes["grouped"].ran == [2, 8]
    return [route.name for route in layer.plan.routes]


ALL = ["single", "several", "legacy"]
FOLDERS: list[tuple[str, int, Format, int]] = [
    ("tiny-qwen3-moe-awq", 1, AWQ, 32),
    ("compressed-tensors-asymmetric", 0, COMPRESSED, 32),
    ("compressed-tensors-asymmetric", 1, COMPRESSED, -1),
    ("compressed-tensors-symmetric", 0, COMPRESSED, 128),
    ("gptq-v1-asymmetric", 0, GPTQ_V1, 32),
    ("gptq-v1-asymmetric", 1, GPTQ_V1, 128),
    ("gptq-v2-symmetric", 1, GPTQ_V2, 128),
]


def checkpoint_of(folder: str, layer: int, ranks: int, rank: int) -> tuple[CheckpointSource, LayerFacts]:
    checkpoint = Checkpoint.open(DATA / folder)
    of = checkpoint.layer(layer)
    found = checkpoint.facts(of, tensor_parallel=ranks, tensor_rank=rank, device="cuda:0")
    facts = replace(found, activations="float16")  # one of them says bfloat16
    return CheckpointSource(checkpoint, of, facts), facts


def tensors_of(folder: str, layer: int, form: Format, group: int) -> TensorSource:
    """The whole layer as an engine without tensor parallelism holds it."""
    across = 0 if form.name == "compressed-tensors" else 1
    stacks: dict[str, list[torch.Tensor]] = {}
    tensors = load_file(DATA / folder / "model.safetensors")
    for expert in sorted({int(n.split(".")[5]) for n in tensors if f"layers.{layer}.mlp.experts." in n}):
        name = f"model.layers.{layer}.mlp.experts.{expert}"
        for part in form.all:
            if f"{name}.up_proj.{part.kind}" in tensors and part in (form.codes, form.zeros, form.scales):
                both = [tensors[f"{name}.{matrix}_proj.{part.kind}"] for matrix in ("gate", "up")]
                stacks.setdefault(f"w13_{part.kind}", []).append(torch.cat(both, across))
                stacks.setdefault(f"w2_{part.kind}", []).append(tensors[f"{name}.down_proj.{part.kind}"])
    return TensorSource.of(form, {name: torch.stack(stack) for name, stack in stacks.items()}, group=group)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize(("folder", "layer", "form", "group"), FOLDERS)
def test_right_kernels_pass_on_files_of_every_format(
    folder: str, layer: int, form: Format, group: int, ranks: int, rank: int
) -> None:
    """Each rank's share too, also where it is re-grouped."""
    assert proven(*checkpoint_of(folder, layer, ranks, rank)) == ALL


@pytest.mark.parametrize(("folder", "layer", "form", "group"), FOLDERS)
def test_right_kernels_pass_on_an_engines_tensors(folder: str, layer: int, form: Format, group: int) -> None:
    """The same layers as an engine has loaded them; the source is let go afterwards."""
    _, facts = checkpoint_of(folder, layer, 1, 0)
    source = tensors_of(folder, layer, form, group)
    assert proven(source, facts) == ALL
    with pytest.raises(BackendError, match="released"):
        source.read(0, 32)


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (LAYER, {"top_k": 1}),
        (LAYER, {"top_k": 9}),  # more slots than experts
        (replace(LAYER, experts=1), {"top_k": 1}),
        (replace(LAYER, experts=1), {"top_k": 2}),
        (replace(LAYER, experts=2), {"index": 47}),
        (LAYER, {"index": None}),
        (replace(LAYER, hidden=256, intermediate=256, group=128, ranks=2, rank=1), {}),
        (replace(LAYER, hidden=256, intermediate=768, group=128, ranks=4, rank=3), {}),  # re-grouped to 64
        (replace(LAYER, intermediate=320, group=32, ranks=2, rank=1), {}),
    ],
)
def test_right_kernels_pass_on_odd_layers(source: SyntheticLayer, changes: dict[str, Any]) -> None:
    """One expert, one slot, ranks in the middle of a group."""
    assert proven(source, facts_of(source, **changes)) == ALL


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_dtypes_are_judged_by_their_own_bounds(dtype: str) -> None:
    """A backend that declares them is tried with them: right ones pass, a wrong zero does not."""
    declared = capability("grouped")
    assert declared is not None
    ability = replace(declared, dtypes=frozenset({dtype}))
    facts = facts_of(LAYER, activations=dtype)
    left = ALL if dtype == "float16" else ["several", "legacy"]  # qpn declares FP16 alone
    assert proven(LAYER, facts, ability=ability) == left
    service, _ = service_of({**FAULTS["wrong zero"], "ability": ability})
    decision = service.layer(facts, LAYER, device="cpu").plan.admission.decision("several")
    assert decision.reasons == (Reason.PROOF_FAILED,)


# ---- parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [inf, nan, 1.0, 0.5, 1.0001])
def test_a_record_is_plain_json(number: float) -> None:
    """Infinity and NaN are texts, since JSON has neither; neither of them is a pass."""
    proof = Proof("several", (2, 8), (0, 1), 0.5, number)
    assert proof.ok is (number <= 1)
    record = json.loads(json.dumps(proof.record(), allow_nan=False))
    assert record["out"] == ("inf" if number == inf or isnan(number) else number)
    assert (record["route"], record["tokens"], record["experts"], record["error"]) == ("several", [2, 8], [0, 1], "")


def test_layers_are_tried_with_other_experts_and_columns() -> None:
    """A fault in one place of all banks alike is met by some layer."""
    assert {expert for index in range(48) for expert in chosen(512, index)} >= set(range(48)) | {256, 293}
    assert len({word(2560, index).start for index in range(48)}) == 48
    assert {word(64, index).start for index in range(48)} == set(range(0, 64, 8))
    for experts in (1, 2, 3, 7):
        for index in range(20):
            assert set(chosen(experts, index)) <= set(range(experts))
    for size in (8, 16, 24, 160):
        for index in range(50):
            assert 0 <= word(size, index).start < word(size, index).stop <= size


SPANS = [(range(8), range(8)), (range(8, 16), range(248, 256)), (range(16, 32), range(64, 128))]


def same_columns(source: WeightSource, group: int, inner: range, outer: range) -> None:
    for expert in (0, source.experts - 1):
        whole, cut = source.read(expert, group), read_columns(source, expert, group, inner, outer)
        for matrix, span in (("gate", inner), ("up", inner), ("down", outer)):
            for name in ("codes", "zeros", "scales"):
                expected = getattr(getattr(whole, matrix), name)[:, span.start : span.stop]
                found = getattr(getattr(cut, matrix), name)
                assert found.dtype is expected.dtype
                assert torch.equal(found, expected), (expert, matrix, name)


@pytest.mark.parametrize(("folder", "layer", "form", "group"), FOLDERS)
def test_columns_are_those_of_the_whole(folder: str, layer: int, form: Format, group: int) -> None:
    """`read_columns` gives what `read` does, cut: files and tensors of every format, every rank."""
    tensors = tensors_of(folder, layer, form, group)
    files = [checkpoint_of(folder, layer, ranks, rank)[0] for ranks, rank in ((1, 0), (2, 1), (4, 3))]
    for inner, outer in SPANS:
        for source in (tensors, *files):
            same_columns(source, 32, inner, outer)


def test_columns_of_a_source_that_only_reads() -> None:
    """It is read whole, and cut."""
    same_columns(replace(LAYER, hidden=256), 32, range(8, 24), range(96, 104))


# ---- kernels for the layer's sizes, and those for any ---------------------------------------------------


@dataclass(frozen=True)
class Exact(Planted):
    """Wrong with the kernels that were made for the layer's sizes; `always`: with all of them."""

    specialiser: Specialiser | None = None
    always: bool = False

    def run(self, banks: Banks, call: Call, space: Any = None) -> None:
        super().run(banks, call, space)
        sizes = {"hidden": LAYER.hidden, "intermediate": LAYER.intermediate, "top_k": 3, "group": LAYER.group}
        axes = {"metadata": banks.layout.metadata.value, "order": "octet32", "step": "own"}
        assert self.specialiser is not None
        if self.always or self.specialiser.image("decode_w13", "sm_70", sizes, axes) is not None:
            call.out.zero_()


def with_kernels(monkeypatch: pytest.MonkeyPatch, always: bool = False) -> tuple[AdmissionService, Specialiser]:
    """A service whose kernels are compiled for a layer's sizes, by a compiler that gives any bytes."""
    monkeypatch.setattr(specialiser_module, "judged", lambda *_: ())
    made = Specialiser(None, compiler=lambda jobs, _: {job.key: b"cubin" for job in jobs}, missing=str)
    service, fakes = service_of()
    build, portable = service.machine.build, fakes["qpn"].portable
    assert build is not None
    there = replace(build, backends=dict.fromkeys(STEPS, frozenset({"sm_70"})), specialiser=made)
    odd = Exact("grouped", portable, specialiser=made, always=always)
    backends = MappingProxyType({**service.machine.backends, "grouped": odd})
    machine = replace(service.machine, build=there, backends=backends)
    return AdmissionService(settings(), policy=POLICY, machine=machine), made


def versions_of(layer: MoELayer) -> dict[str, str]:
    return {route.name: route.choice.version for route in layer.plan.routes}


def test_kernels_for_the_sizes_that_are_wrong_do_not_cost_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for any sizes run instead, in this layer and in the next one; the record says why."""
    service, _ = with_kernels(monkeypatch)
    with capture_logs() as events:
        layer = service.layer(facts_of(LAYER), LAYER, device="cpu")
    assert versions_of(layer) == {"single": RUN_TIME, "several": RUN_TIME, "legacy": ""}
    assert service.plans() == (layer.plan,)
    (event,) = [event for event in events if event["event"] == "moe kernels" and event["log_level"] == "warning"]
    assert (event["layer"], event["route"], event["out"] > 1) == (layer.plan.layer, "several", True)
    assert "moe proof" not in {event["event"] for event in events}
    with capture_logs() as events:
        second = service.layer(facts_of(LAYER, layer="model.layers.2.mlp.experts", index=2), LAYER, device="cpu")
    assert versions_of(second) == versions_of(layer)
    assert [event for event in events if event["log_level"] == "warning"] == []


def test_a_fault_that_is_not_the_kernels_leaves_them_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong with both versions: the route falls back, the other one keeps the kernels for its sizes."""
    service, _ = with_kernels(monkeypatch, always=True)
    layer = service.layer(facts_of(LAYER), LAYER, device="cpu")
    assert versions_of(layer) == {"single": SPECIALISED, "legacy": ""}
    assert layer.plan.admission.decision("several").reasons == (Reason.PROOF_FAILED,)
