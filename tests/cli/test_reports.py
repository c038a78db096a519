"""Reports of issue 13 that are about answers, not files: alike layers, dtypes, plain layers, others' variables."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import ones

from sm70_moe import AdmissionRefused, AdmissionService, admit
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.decision import Reason
from sm70_moe.facts import CallFacts, LayerFacts
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import choose_policy, load_policies, load_policy
from sm70_moe.testing import contract_facts, fake_build, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
PLAIN: dict[str, Any] = {
    "format": "none", "packing": None, "bits": None, "zero_point": None, "checkpoint_group": None
}  # fmt: skip
LAYERS = 94

# --- alternating-layers-flood: alike layers are told once, however they alternate


def shuffled(layer: int) -> int:
    return random.Random(layer // 12).sample(range(4), 4)[layer % 4]


PATTERNS: dict[str, Callable[[int], int]] = {
    "alike": lambda layer: 0,
    "alternating": lambda layer: layer % 2,
    "three in turn": lambda layer: layer % 3,
    "every fourth": lambda layer: int(layer % 4 == 3),
    "blocks": lambda layer: layer // 40,
    "shuffled": shuffled,
}

KINDS: list[dict[str, Any]] = [{}, {"bits": 8}, PLAIN, {"checkpoint_group": 64}]


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_each_kind_of_layer_is_told_once(pattern: str, tmp_path: Path) -> None:
    """A line for each decision about each kind, and between them they name every layer once."""
    kinds = [PATTERNS[pattern](layer) for layer in range(LAYERS)]
    given = settings(SM70_MOE_JOURNAL=str(tmp_path / "j.jsonl"))
    with AdmissionService(given, policy=FIRST, machine=fake_machine()) as service:
        plans = [
            service.admit(contract_facts(FIRST, f"model.layers.{layer}.mlp.experts", index=layer, **KINDS[kind]))
            for layer, kind in enumerate(kinds)
        ]
    lines = [json.loads(line) for line in (tmp_path / "j.rank0.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["event"] == "moe decision"]
    decisions = len(plans[0].decisions)
    assert len(told) == decisions * len(set(kinds))
    for feature in {line["feature"] for line in told}:
        named = [layers_of(line["layers"]) for line in told if line["feature"] == feature]
        expected = [[layer for layer, kind in enumerate(kinds) if kind == one] for one in dict.fromkeys(kinds)]
        assert named == expected


def layers_of(text: str) -> list[int]:
    """ "0-2,5" -> 0, 1, 2, 5."""
    ends = [part.split("-") for part in text.split(",")]
    return [layer for part in ends for layer in range(int(part[0]), int(part[-1]) + 1)]


# --- bf16-declared-on-a-v100: what is admitted is what calls of the engine's dtype take


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("policy", ["qwen3.8-flash-next-awq-tp4", "qwen3-30b-a3b-awq-tp4", "generic-awq"])
@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
def test_admitted_routes_are_those_that_calls_take(capability: tuple[int, int], policy: str, dtype: str) -> None:
    """A call of each length, in the dtype of the facts, takes the first admitted route that has its length."""
    chosen = load_policy(policy)
    facts = replace(contract_facts(FIRST if policy == "generic-awq" else chosen), activations=dtype)
    plan = Plan(admit(chosen, settings(), facts, fake_machine(capability, fake_build(images={"sm_70", "sm_90"}))))
    for tokens in (1, 2, 4, 8, 9, 64, 127, 128, 2000):
        call = CallFacts.usual(tokens, facts.hidden or 0, facts.top_k or 0, dtype)
        first = next(r.name for r in plan.routes if r.tokens.first <= tokens <= (r.tokens.last or tokens))
        taken = plan.route(call)
        assert taken is not None
        assert taken.name == first


# --- flag-1-and-a-plain-layer: a layer that is not quantised is the engine's own, under every flag


@pytest.mark.parametrize("flag", [None, "SM70_MOE_LEGACY_SINGLE_TOKEN", "SM70_MOE_NATIVE_DECODE"])
@pytest.mark.parametrize("plain", ["layer 0", "a layer between", "an MTP layer", "all layers"])
def test_plain_layers_refuse_no_flag(
    command: Any, flag: str | None, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """explain --strict and prepare say so with 0; a flag of the quantised layers still counts for those."""
    folder = sample(tmp_path / "in", plain)
    monkeypatch.setenv("SM70_MOE_POLICY", "sample-awq-tp2")
    if flag is not None:
        monkeypatch.setenv(flag, "1")
    ended = command("explain", folder, "--tp", 2, "--json", "--strict")
    outcomes = {
        layer: {decision["outcome"] for decision in group["decisions"]}
        for group in json.loads(ended.out)["groups"]
        for layer in group["layers"]
    }
    ours = [layer for layer, found in outcomes.items() if not found <= {"not ours", "off"}]
    assert len(outcomes) == 3
    assert len(ours) == (0 if plain == "all layers" else 2)
    native = flag is not None and "LEGACY" not in flag and bool(ours)  # there is no build: it is refused
    assert ("refused" in {one for found in outcomes.values() for one in found}) is native
    assert ended.code == int(native)
    assert command("prepare", folder, tmp_path / "out", "--tp", 2).code == int(native)


def sample(folder: Path, plain: str) -> Path:
    """Three small layers, of which some are not quantised."""
    write_sample(folder, hidden=64, intermediate=64, experts=2, top_k=1, layers=3, group=32, seed=0)
    rename = {"layer 0": "0", "a layer between": "1", "an MTP layer": "2", "all layers": "012"}[plain]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in list(tensors):
        if name.split(".")[2] in rename:
            tensor = tensors.pop(name)
            if name.endswith(".scales"):
                tensors[name.replace(".scales", ".weight")] = ones(tensor.shape[1], 64).half()
    if plain == "an MTP layer":
        tensors = {name.replace("model.layers.2.", "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2 if plain == "an MTP layer" else 3
    # the way in which such files say it
    skipped = ["mtp."] if plain == "an MTP layer" else [f"model.layers.{number}." for number in rename]
    config["quantization_config"]["modules_to_not_convert"] = skipped
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- host-variables: an engine's own variables are not ours to judge


@pytest.mark.parametrize(
    "theirs",
    [
        {"VLLM_SM70_QUANT_BACKEND": "marlin", "VLLM_SM70_AWQ_TURBOMIND": "1"},
        {"VLLM_SM70_FLASH_ATTN": "1"},
        {"VLLM_SM70_AWQ_MOE_TURBOMIND_WORKSPACE": "64", "VLLM_SM70_GPTQ_BACKEND": "x"},
        {"VLLM_USE_V1": "1", "VLLM_SM70_": ""},
    ],
    ids=lambda theirs: next(iter(theirs)),
)
def test_strict_lives_beside_an_engines_variables(
    command: Any, theirs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error under strict, no warning without; a misspelt name of ours beside them is still one."""
    folder = sample(tmp_path / "in", "layer 0")
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    assert "warning" not in command("explain", folder).err
    monkeypatch.setenv("SM70_MOE_STRICT", "1")
    assert command("explain", folder).code == 0
    monkeypatch.setenv("VLLM_SM70_AWQ_MOE_COMPACT_METADTA", "1")
    ended = command("explain", folder)
    assert ended.code == 2
    assert "VLLM_SM70_AWQ_MOE_COMPACT_METADTA" in ended.err
    assert not any(name in ended.err for name in theirs if name != "VLLM_SM70_")


# --- no-policy-no-word: a geometry without a policy of its own


GEOMETRIES = {
    "MiniMax-M2": {"hidden": 3072, "intermediate": 1536, "experts": 256, "top_k": 8, "tensor_parallel": 8},
    "Mixtral": {"hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2, "tensor_parallel": 4},
    "GLM-4.5-Air": {"hidden": 4096, "intermediate": 1408, "experts": 128, "top_k": 8, "tensor_parallel": 1},
    "OLMoE": {"hidden": 2048, "intermediate": 1024, "experts": 64, "top_k": 8, "tensor_parallel": 2},
}


def facts_of(name: str) -> LayerFacts:
    return contract_facts(FIRST, checkpoint_group=128, **GEOMETRIES[name])


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_a_geometry_without_a_policy_has_native_routes_and_a_word(name: str) -> None:
    """All lengths run natively on a V100 with the general policy, or the record says how slow it is."""
    policies, facts = load_policies(None), facts_of(name)
    plan = Plan(admit(choose_policy(policies, facts), settings(), facts, fake_machine(), others=policies))
    assert plan.admission.policy.name == "generic-awq"
    taken = [plan.route(CallFacts.usual(t, facts.hidden or 0, facts.top_k or 0)) for t in (1, 8, 9, 127, 128, 4096)]
    assert [route.name for route in taken if route] == [
        "native_decode", "native_decode", "grouped_batch", "grouped_batch", "native_prefill", "native_prefill"
    ]  # fmt: skip


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_a_flag_that_it_lacks_names_the_nearest_policy(name: str) -> None:
    """Which has it, and what differs; never that `generic-awq` has flags which it does not."""
    facts = facts_of(name)
    service = AdmissionService(settings({"qpn_m1": "1"}), machine=fake_machine())
    with pytest.raises(AdmissionRefused) as refused:
        service.admit(facts)
    (decision,) = [one for one in refused.value.decisions if one.feature == "qpn_m1"]
    assert Reason.FLAG_UNDECLARED in decision.reasons
    assert {Reason.HIDDEN, Reason.INTERMEDIATE, Reason.EXPERTS} & set(decision.reasons)
    assert "has the flag, what differs from it:" in decision.findings[0].hint
    assert any(
        policy.name in decision.findings[0].hint for policy in load_policies(None) if "qpn_m1" in policy.features
    )
