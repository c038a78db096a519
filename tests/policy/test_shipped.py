"""The policies that come with the package."""

from __future__ import annotations

import csv
import json
from math import gcd
from pathlib import Path

import pytest

from sm70_moe.policy import Policy, load_policy, policies_folder, policy_schema, shipped_policies

FIRST = "qwen3.8-flash-next-awq-tp4"
NATIVE = [p for p in shipped_policies() if not p.contract.any_geometry]
MODELS = [p for p in NATIVE if not p.name.startswith("sample-")]


def test_the_shipped_policies() -> None:
    """Sorted by name, each in a file of its name, digests all different."""
    policies = shipped_policies()
    assert [p.name for p in policies] == [
        "generic-awq",
        "qwen3-30b-a3b-awq-tp4",
        "qwen3-next-80b-a3b-awq-tp4",
        "qwen3.8-flash-next-awq-tp4",
        "sample-awq-tp2",
    ]
    assert all(Path(p.origin) == policies_folder() / f"{p.name}.toml" for p in policies)
    assert len({p.digest for p in policies}) == len(policies)


def test_the_first_contract() -> None:
    """Field by field as it was agreed on."""
    assert load_policy(FIRST).contract.model_dump() == {
        "architectures": ("sm_70", "sm_90"),
        "tensor_parallel": 4,
        "expert_parallel": 1,
        "experts": 512,
        "top_k": 10,
        "hidden": 2560,
        "intermediate": 160,
        "activation": "silu",
        "activations": "float16",
        "weights": {
            "format": None,  # every readable one becomes the same banks
            "packing": None,
            "bits": 4,
            "zero_point": True,
            "checkpoint_group": 32,
            "prepared_group": 32,
        },
    }


def test_the_flags_of_the_first_contract() -> None:
    """Variables that operators already export, word for word, with what unset means."""
    features = load_policy(FIRST).features
    assert {name: (f.env, f.unset, f.needs) for name, f in features.items()} == {
        "batched_banks": (("VLLM_SM70_AWQ_MOE_BATCHED_GEMM",), "auto", ()),
        "compact_metadata": (("VLLM_SM70_AWQ_MOE_COMPACT_METADATA",), "auto", ()),
        "qpn_m1": (("VLLM_SM70_AWQ_QWEN38_QPN_M1",), "auto", ("batched_banks", "legacy_single_token")),
        "legacy_single_token": (("VLLM_SM70_AWQ_MOE_LEGACY_SINGLE_TOKEN_COMPACT",), "auto", ("batched_banks",)),
        "grouped_decode": (("VLLM_SM70_AWQ_QWEN38_MOE_COMPACT_GROUPED_DECODE",), "auto", ("batched_banks",)),
        "indexed_prefill": (("VLLM_SM70_AWQ_QWEN38_MOE_INDEXED_PREFILL",), "auto", ("batched_banks",)),
        "native_decode": ((), "auto", ("batched_banks",)),
        "grouped_batch": ((), "auto", ("batched_banks",)),
        "native_prefill": ((), "auto", ("batched_banks",)),
        "tune_small_shapes": (("VLLM_SM70_AWQ_TUNE_SMALL_SHAPES",), "off", ()),
        "fused_decode": ((), "off", ("qpn_m1",)),
    }
    native = [name for name, f in features.items() if f.native]
    assert native == [
        *("qpn_m1", "grouped_decode", "indexed_prefill", "native_decode", "grouped_batch", "native_prefill"),
        "fused_decode",
    ]
    assert [name for name, f in features.items() if f.interleaves_w13] == ["legacy_single_token"]
    assert [name for name, f in features.items() if f.layer_lists] == ["batched_banks"]
    assert [name for name, f in features.items() if f.batches] == ["batched_banks"]
    assert {name: f.metadata for name, f in features.items() if f.metadata} == {"compact_metadata": "3-byte"}


@pytest.mark.parametrize(
    ("tokens", "routes"),
    [
        (1, ["qpn_m1", "native_decode", "legacy_single_token", "legacy"]),
        (2, ["grouped_decode", "native_decode", "legacy"]),
        (8, ["grouped_decode", "native_decode", "legacy"]),
        (9, ["grouped_batch", "legacy"]),
        (127, ["grouped_batch", "legacy"]),
        (128, ["indexed_prefill", "native_prefill", "legacy"]),
        (8192, ["indexed_prefill", "native_prefill", "legacy"]),
    ],
)
def test_the_routes_of_the_first_contract(tokens: int, routes: list[str]) -> None:
    """Which routes are tried for how many tokens, in order."""
    assert [route.name for route in load_policy(FIRST).routes if tokens in route.tokens] == routes


def test_the_call_conditions_of_the_single_token_kernel() -> None:
    """Types, shapes and alignment that the kernel reads without looking."""
    call = load_policy(FIRST).routes[0].call
    assert call is not None
    assert call.model_dump() == {
        "x": "float16",
        "ids": "int32",
        "weights": "float32",
        "contiguous": True,
        "alignment": 16,
        "x_shape": (1, 2560),
        "ids_shape": (1, 10),
        "weights_shape": (1, 10),
    }


def test_published_numbers_come_with_their_limits() -> None:
    """The one measurement there is names what it does not show."""
    (evidence,) = load_policy(FIRST).evidence
    assert evidence.route == "qpn_m1"
    assert evidence.bound == {"w13": 0.173925, "w2": 0.966499}
    assert "not measured on the kernels of this package" in evidence.limits
    assert all(not p.evidence for p in shipped_policies() if p.name != FIRST)


def test_the_generic_policy_runs_anything() -> None:
    """No sizes; native kernels where they hold the layer, else the portable route."""
    policy = load_policy("generic-awq")
    assert policy.contract.any_geometry
    assert list(policy.features) == ["native_decode", "grouped_batch", "native_prefill", "tune_small_shapes"]
    found = [(r.name, r.backend, str(r.tokens), r.order, r.unconditional) for r in policy.routes]
    assert found == [
        ("native_decode", "decode", "1-8", None, False),
        ("grouped_batch", "indexed", "9-127", None, False),
        ("native_prefill", "indexed", "128 and more", None, False),
        ("legacy", "legacy", "1 and more", None, True),
    ]


@pytest.mark.parametrize("policy", MODELS, ids=lambda p: p.name)
def test_contracts_are_rows_of_the_model_table(policy: Policy) -> None:
    """Every size is that of a public model, and the banks' group is one that its shards can have."""
    with (Path(__file__).parents[1] / "data" / "models.csv").open() as file:
        rows = [{key: row[key] for key in ("H", "I", "E", "k", "g", "tp", "i_loc")} for row in csv.DictReader(file)]
    contract, weights = policy.contract, policy.contract.weights
    assert contract.intermediate
    assert weights.checkpoint_group
    assert weights.prepared_group
    assert {
        "H": str(contract.hidden),
        "I": str(contract.whole_intermediate),
        "E": str(contract.experts),
        "k": str(contract.top_k),
        "g": str(weights.checkpoint_group),
        "tp": str(contract.tensor_parallel),
        "i_loc": str(contract.intermediate),
    } in rows
    assert gcd(contract.intermediate, weights.checkpoint_group) % weights.prepared_group == 0


@pytest.mark.parametrize("policy", NATIVE, ids=lambda p: p.name)
def test_kernels_for_native_groups_have_one(policy: Policy) -> None:
    """The single-token and the prefill kernel read groups of 32 as the checkpoint has them, never re-grouped ones."""
    if {"qpn_m1", "indexed_prefill"} & set(policy.features):
        assert policy.contract.weights.checkpoint_group == policy.contract.weights.prepared_group == 32


def test_the_schema_file_is_current() -> None:
    """`sm70-moe policy schema > policies/schema.json` brings it up to date."""
    assert json.loads((policies_folder() / "schema.json").read_text()) == policy_schema()


def test_the_schema_knows_the_keys_of_the_file() -> None:
    """Names of the file, not those of the code; no unknown keys; token ranges in their three forms."""
    schema = policy_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["schema", "name", "revision", "summary", "contract", "route"]
    assert all(part["additionalProperties"] is False for part in [schema, *schema["$defs"].values()])
    forms = schema["$defs"]["Route"]["properties"]["tokens"]["anyOf"]
    assert [form.get("type", form.get("$ref")) for form in forms] == ["integer", "array", "#/$defs/OpenRange"]
    words = schema["$defs"]["Feature"]["properties"]["checks"]["items"]["enum"]
    assert {"contract", "geometry", "bits", "architecture"} <= set(words)
