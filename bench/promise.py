"""What a plan promises, on a GPU: every combination of flags, proofs with planted faults, memory, host time.

    python bench/promise.py OUT.json [seconds] [proofs] [host] [models] [memory] [combinations]

Judges each different plan of the first contract once for each kind of metadata; prints a table of what ran.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sm70_moe.admission.admit import admit
from sm70_moe.admission.exemplar import contract_facts
from sm70_moe.banks.banks import Banks
from sm70_moe.decision import Status
from sm70_moe.errors import AdmissionRefused
from sm70_moe.evidence.synthetic import SyntheticLayer
from sm70_moe.evidence.trial import Inputs, Trial
from sm70_moe.kernels.call import Call
from sm70_moe.layout import BankLayout
from sm70_moe.numbers.codes import Codes, ExpertCodes
from sm70_moe.plan.memory import backend, bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.planned import PlannedRoute
from sm70_moe.policy import Policy, load_policy
from sm70_moe.reading.loading import prepare
from sm70_moe.runtime.arena import Arena
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.proof import Prover
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import settings

DEVICE, EXPERTS, ROWS = "cuda:0", 16, 4
"""Few experts: kernels are not specialised for their number, and the FP64 reference decodes each of them."""

FLAGS = ("qpn_m1", "grouped_decode", "indexed_prefill", "legacy_single_token", "batched_banks", "compact_metadata")
NEWER = ("native_decode", "grouped_batch", "native_prefill")
"""Their combinations are tried with the six unset."""

STATES: tuple[str | None, ...] = (None, "0", "1")
TOKENS = (1, 2, 8, 9, 127, 128)


class Kept(SyntheticLayer):
    """A made-up layer whose codes are made once."""

    def read(self, expert: int, group: int) -> ExpertCodes:
        cache = KEPT.setdefault((self.seed, self.hidden, self.intermediate, group), {})
        if expert not in cache:
            cache[expert] = super().read(expert, group)
        return cache[expert]


KEPT: dict[tuple[int, ...], dict[int, ExpertCodes]] = {}


def policy_of(metadata: str) -> Policy:
    """The first contract's policy with few experts and this kind of compact metadata."""
    document = tomllib.loads(Path(load_policy("qwen3.8-flash-next-awq-tp4").origin).read_text(encoding="utf-8"))
    document["contract"]["experts"] = EXPERTS
    document["features"]["compact_metadata"]["metadata"] = metadata if metadata != "4-byte" else "3-byte"
    return Policy.read(document, "bench/promise")


def combinations(machine: Any) -> Iterator[tuple[str, dict[str, str], Plan | str]]:
    """Each kind of metadata and each combination of flags, with its plan or why it is refused."""
    for metadata in ("4-byte", "3-byte", "2.5-byte"):
        policy = policy_of(metadata)
        for names, states in (*((FLAGS, s) for s in product(STATES, repeat=len(FLAGS))), *newer()):
            flags = {name: state for name, state in zip(names, states, strict=True) if state is not None}
            if metadata == "4-byte":
                flags["compact_metadata"] = "0"
            admission = admit(policy, settings(flags), facts_of(policy), machine)
            refused = ", ".join(f"{d.feature} {'/'.join(r.name for r in d.reasons)}" for d in admission.refused)
            yield metadata, flags, refused or Plan(admission)


def newer() -> Iterator[tuple[tuple[str, ...], tuple[str | None, ...]]]:
    for states in product(STATES, repeat=len(NEWER)):
        if any(states):  # all unset stands among the six's
            yield NEWER, states


def facts_of(policy: Policy, index: int = 0) -> Any:
    return contract_facts(policy, f"model.layers.{index}.mlp.experts", index=index, device=DEVICE)


def every_combination(machine: Any, source: Kept) -> dict[str, Any]:
    """Counts of combinations by what came of them, and one judgement for each different plan."""
    counts: dict[str, int] = {}
    judged: dict[str, Any] = {}
    judge = Judge(source)
    for metadata, flags, found in combinations(machine):
        if isinstance(found, str):
            key = f"refused: {found}"
        else:
            layout = found.layout.tag if found.layout else "none"
            key = f"{layout}: {', '.join(route.name for route in found.routes)}"
            if key not in judged:
                judged[key] = list(judge(found))
        counts[key] = counts.get(key, 0) + 1
        del metadata, flags
    return {"counts": counts, "judged": judged}


@dataclass(slots=True)
class Judge:
    """Judges what was not judged before: a layout's banks are made once, and a route's call on them runs once."""

    source: Kept
    banks: dict[str, Banks] = field(default_factory=dict)
    rows: dict[tuple[str, str, str, int], dict[str, Any]] = field(default_factory=dict)

    def __call__(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """Every route that calls of `TOKENS` may take, against FP64; of long ones four rows."""
        assert plan.layout is not None
        for tokens in TOKENS:
            for route in plan.reachable(tokens):
                key = (plan.layout.tag, route.name, route.backend, tokens)
                if key not in self.rows:
                    self.rows[key] = self.judged(plan, plan.layout, route, tokens)
                yield self.rows[key]

    def judged(self, plan: Plan, layout: BankLayout, route: PlannedRoute, tokens: int) -> dict[str, Any]:
        shape, top_k = bank_shape(plan.admission), plan.admission.facts.top_k or 1
        assert shape is not None
        if layout.tag not in self.banks:
            self.banks[layout.tag] = prepare(self.source, layout, shape, DEVICE)
        banks, runs = self.banks[layout.tag], backend(plan.admission, route.backend)
        call = Inputs.random(tokens, top_k, hidden=shape.hidden, experts=EXPERTS, seed=tokens, device=DEVICE)
        trial = Trial(
            route.name,
            route.backend,
            lambda c: runs.run(banks, c),
            self.source.reference,
            shape.intermediate,
            2.0,
            ROWS,
        )
        return trial.judge(call).record()


def swapped(found: ExpertCodes) -> ExpertCodes:
    return ExpertCodes(found.up, found.gate, found.down)


def off_by_one(codes: Codes) -> Codes:
    return Codes(codes.codes, (codes.zeros + 1) % 16, codes.scales)


class Altered:
    """A source that gives something else than the weights are."""

    def __init__(self, source: Kept, change: Callable[[ExpertCodes], ExpertCodes]) -> None:
        self.source, self.change = source, change

    experts = EXPERTS

    def read(self, expert: int, group: int) -> ExpertCodes:
        return self.change(self.source.read(expert, group))


def faults(plan: Plan, source: Kept) -> Iterator[tuple[str, Banks]]:
    """Banks that are wrong in one way each."""
    layout, shape = plan.layout, bank_shape(plan.admission)
    assert layout is not None
    assert shape is not None

    def zeros(found: ExpertCodes) -> ExpertCodes:
        return ExpertCodes(*(off_by_one(part) for part in (found.gate, found.up, found.down)))

    def rolled(found: ExpertCodes) -> ExpertCodes:
        parts = (found.gate, found.up, found.down)
        return ExpertCodes(*(Codes(p.codes, p.zeros.roll(1, 0), p.scales.roll(1, 0)) for p in parts))

    yield "none", prepare(source, layout, shape, DEVICE)
    yield "gate and up swapped", prepare(Altered(source, swapped), layout, shape, DEVICE)
    other = prepare(source, replace(layout, interleaved=not layout.interleaved), shape, DEVICE)
    yield "other interleave", replace(other, layout=layout)
    yield "zeros off by one", prepare(Altered(source, zeros), layout, shape, DEVICE)
    yield "groups moved by one", prepare(Altered(source, rolled), layout, shape, DEVICE)
    yield "another layer's bank", prepare(Kept(EXPERTS, 2560, 640, 32, 4, 0, seed=99), layout, shape, DEVICE)
    spoilt = prepare(source, layout, shape, DEVICE)
    spoilt.w2.planes["words"].view(torch.uint8).bitwise_xor_(1)  # type: ignore[union-attr]  # batched
    yield "W2 with a flipped bit in each byte", spoilt


def proofs(plan: Plan, source: Kept) -> dict[str, Any]:
    """What the proof says of each fault; and its time for 48 layers."""
    space, found = Arena(DEVICE), {}
    space.reserve(1 << 22)
    backends = {route.backend: backend(plan.admission, route.backend) for route in plan.routes}
    for name, banks in faults(plan, source):
        found[name] = [proof.record() for proof in Prover().prove(plan, banks, source, backends, space)]
    good, prover = prepare(source, plan.layout, bank_shape(plan.admission), DEVICE), Prover()  # type: ignore[arg-type]
    for index in range(48):  # codes are made and kept by the first round
        prover.prove(with_index(plan, index), good, source, backends, space)
    timed, whole = Prover(_inputs=prover._inputs), 0.0
    for index in range(48):
        timed.prove(with_index(plan, index), good, source, backends, space)
        first = Prover(_inputs=prover._inputs, _versions=timed._versions)
        first.prove(with_index(plan, index), good, source, backends, space)
        whole += first.seconds
    later = [
        name for name, banks in faults(plan, source) if not caught_later(plan, banks, good, source, backends, space)
    ]
    return {
        "faults": found,
        "not caught on a layer that is alike": later,
        "milliseconds a layer": timed.seconds / 48 * 1e3,
        "with every version": whole / 48 * 1e3,
        "told": timed.news(),
    }


def caught_later(plan: Plan, banks: Banks, good: Banks, source: Kept, backends: dict[str, Any], space: Arena) -> bool:
    """Is this bank found out at every turn, on a layer like one that was right?"""
    for turn in range(6):
        prover = Prover()
        for index in range(1 + turn):
            assert all(proof.ok for proof in prover.prove(with_index(plan, index), good, source, backends, space))
        if all(proof.ok for proof in prover.prove(with_index(plan, 1 + turn), banks, source, backends, space)):
            return False
    return True


def with_index(plan: Plan, index: int) -> Plan:
    admission = plan.admission
    return Plan(replace(admission, facts=replace(admission.facts, index=index)))


def memory(plan: Plan, banks: Banks) -> list[dict[str, Any]]:
    """Stated and measured bytes of a call's working memory."""
    rows = []
    for tokens in (1, 2, 8, 9, 128, 1024, 4877, 8192):
        call = Inputs.random(tokens, 10, hidden=2560, experts=EXPERTS, seed=1, device=DEVICE)
        for route in plan.reachable(tokens)[-1:] if tokens > 8 else plan.reachable(tokens):
            runs, out = backend(plan.admission, route.backend), torch.empty_like(call.x)
            runs.run(banks, Call(call.x, call.ids, call.weights, out))
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            runs.run(banks, Call(call.x, call.ids, call.weights, out))
            torch.cuda.synchronize()
            measured = torch.cuda.max_memory_allocated() - before
            stated = runs.workspace(banks.shape, 10, tokens)
            rows.append({"route": route.name, "tokens": tokens, "stated": stated, "measured": measured})
    return rows


GEOMETRIES = {
    "Qwen3-30B TP 1": (2048, 768, 8, 128),
    "Qwen3-30B TP 2": (2048, 384, 8, 128),
    "GLM-4.5-Air TP 4": (4096, 352, 8, 32),
    "Qwen3-Next TP 1": (2048, 512, 10, 128),
    "Mixtral TP 4": (4096, 3584, 2, 128),
    "DeepSeek-V2-Lite TP 2": (2048, 704, 6, 64),
    "MiniMax-M2 TP 8": (3072, 192, 8, 64),
}
"""Hidden, intermediate of a rank, top-k, group."""


def without_a_policy() -> dict[str, Any]:
    """Layers of other models, as an engine admits them with the shipped policies: proven, then judged."""
    found: dict[str, Any] = {}
    for name, (hidden, inner, top_k, group) in GEOMETRIES.items():
        facts = facts_of(policy_of("4-byte"))
        sizes = {"hidden": hidden, "intermediate": inner, "experts": 12, "top_k": top_k, "tensor_parallel": 1}
        facts = replace(facts, **sizes, checkpoint_group=group, format="gptq", packing="gptq")
        source = Kept(12, hidden, inner, group, seed=3)
        service = AdmissionService(settings({"native_decode": "1"}))
        layer = service.layer(facts, source, device=DEVICE)
        rows = []
        for tokens in (1, 2, 4, 8):
            call = Inputs.random(tokens, top_k, hidden=hidden, experts=12, seed=tokens, device=DEVICE)
            route = layer.plan.reachable(tokens)[0]
            runs = backend(layer.plan.admission, route.backend)
            trial = Trial(
                route.name, route.backend, lambda c, r=runs, b=layer.banks: r.run(b, c), source.reference, inner, 2.0, 2
            )
            rows.append(trial.judge(call).record())
        found[name] = {"plan": [str(route) for route in layer.plan.routes], "rows": rows}
        print(name, found[name]["plan"][0], [(r["w13"], r["w2"], r["ok"]) for r in rows], flush=True)
    return found


def host_time(plan: Plan, banks: Banks) -> dict[str, float]:
    """Microseconds of host time of an eager layer call, the best of a few rounds."""
    space = Arena(DEVICE)
    space.reserve(1 << 22)
    backends = {route.backend: backend(plan.admission, route.backend) for route in plan.routes}
    layer, found = MoELayer(plan, banks, backends, None, space), {}
    for tokens in (1, 4, 8):
        call = Inputs.random(tokens, 10, hidden=2560, experts=EXPERTS, seed=1, device=DEVICE)
        out, best = torch.empty_like(call.x), float("inf")
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                layer(call.x, call.ids, call.weights, out)
            best = min(best, (time.perf_counter() - start) / 200)
        found[str(tokens)] = best * 1e6
    return found


def main(out: Path, seconds: float, only: list[str]) -> None:
    start, report = time.monotonic(), {}
    source = Kept(EXPERTS, 2560, 640, 32, 4, 0, seed=5)
    service = AdmissionService(settings(), policy=policy_of("4-byte"))
    plan = service.admit(facts_of(service.policies[0]))
    print("plan", [str(route) for route in plan.routes], flush=True)
    assert not [f for d in plan.decisions for f in d.findings if f.status is Status.ERROR]
    banks = prepare(source, plan.layout, bank_shape(plan.admission), DEVICE)  # type: ignore[arg-type]
    parts: dict[str, Callable[[], Any]] = {
        "proofs": lambda: proofs(plan, source),
        "host": lambda: host_time(plan, banks),
        "models": without_a_policy,
        "memory": lambda: memory(plan, banks),
        "combinations": lambda: every_combination(service.machine, source),
    }
    for name, part in parts.items():
        if only and name not in only:
            continue
        if time.monotonic() - start > seconds:
            report[name] = "no time left"
            continue
        began = time.monotonic()
        try:
            report[name] = part()
        except (Exception, AdmissionRefused) as error:  # the other parts are worth having
            report[name] = f"{type(error).__name__}: {error}"
        print(name, f"{time.monotonic() - began:.1f} s", flush=True)
        out.write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")
    combined = report.get("combinations")
    if isinstance(combined, dict):
        for key, results in combined["judged"].items():
            worst = max(r["w13"] or 9e9 for r in results), max(r["w2"] or 9e9 for r in results)
            right, count = all(r["ok"] for r in results), combined["counts"][key]
            print(f"{count:5d}  {key}  W13 {worst[0]:.3f} W2 {worst[1]:.3f} ok {right}")
        print(sum(n for k, n in combined["counts"].items() if k.startswith("refused")), "refused")
    print(json.dumps({k: report[k] for k in ("host", "memory") if k in report}))
    if isinstance(report.get("proofs"), dict):
        for name, rows in report["proofs"]["faults"].items():
            print(name, [(r["route"], r["w13"], r["out"], r["error"][:60]) for r in rows])
        print({name: value for name, value in report["proofs"].items() if name != "faults"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 400.0, sys.argv[3:])
