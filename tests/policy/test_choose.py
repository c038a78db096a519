from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sm70_moe.errors import PolicyError
from sm70_moe.facts import LayerFacts
from sm70_moe.policy import Policy, choose_policy, load_policy, shipped_policies

FACTS = LayerFacts(
    layer="layers.0",
    hidden=256,
    intermediate=256,
    experts=16,
    top_k=2,
    format="awq",
    packing="gemm",
    bits=4,
    zero_point=True,
    checkpoint_group=128,
    activation="silu",
    activations="float16",
    tensor_parallel=4,
    expert_parallel=1,
)


def policy(name: str, *, weights: dict[str, Any] | None = None, **contract: Any) -> Policy:
    return Policy.model_validate(
        {
            "schema": 1,
            "name": name,
            "revision": 1,
            "summary": name,
            "contract": contract | {"weights": weights or {}},
            "route": [{"name": "legacy", "backend": "legacy"}],
        }
    )


MODEL: dict[str, Any] = {"hidden": 256, "experts": 16, "top_k": 2}
GENERIC = policy("generic")
SHELF = (
    GENERIC,
    policy("tp1", **MODEL, intermediate=256, tensor_parallel=1),
    policy("tp2-g128", **MODEL, intermediate=128, tensor_parallel=2, weights={"checkpoint_group": 128}),
    policy("tp4-g32", **MODEL, intermediate=64, tensor_parallel=4, weights={"checkpoint_group": 32}),
    policy("tp4-g128", **MODEL, intermediate=64, tensor_parallel=4, activations="float16",
           weights={"checkpoint_group": 128}),
    policy("tp4-g128-bf16", **MODEL, intermediate=64, tensor_parallel=4, activations="bfloat16",
           weights={"checkpoint_group": 128}),
    policy("unlike", hidden=512, experts=16, top_k=2, intermediate=64, tensor_parallel=4),
)  # fmt: skip

TABLE: list[tuple[dict[str, Any], str]] = [
    ({}, "tp4-g128"),
    ({"checkpoint_group": 32}, "tp4-g32"),
    ({"checkpoint_group": 64}, "tp4-g128"),
    ({"checkpoint_group": None}, "tp4-g128"),
    ({"activations": "bfloat16"}, "tp4-g128-bf16"),
    ({"activations": None}, "tp4-g128"),
    ({"tensor_parallel": 1}, "tp1"),
    ({"tensor_parallel": 2}, "tp2-g128"),
    ({"tensor_parallel": 2, "checkpoint_group": 32}, "tp2-g128"),
    ({"tensor_parallel": 8}, "tp2-g128"),
    ({"tensor_parallel": 8, "checkpoint_group": 32}, "tp4-g32"),
    ({"tensor_parallel": None}, "tp2-g128"),
    ({"hidden": 512}, "unlike"),
    ({"hidden": 128}, "generic"),
    ({"experts": 8}, "generic"),
    ({"top_k": 4}, "generic"),
    ({"intermediate": 512}, "generic"),
    ({"hidden": None}, "generic"),
    ({"experts": None}, "generic"),
    ({"top_k": None}, "generic"),
    ({"intermediate": None}, "generic"),
    ({"format": "gptq", "bits": 8}, "tp4-g128"),
    ({"format": None}, "tp4-g128"),
]


@pytest.mark.parametrize(("changes", "chosen"), TABLE, ids=str)
def test_the_closest_policy_of_the_model_is_chosen(changes: dict[str, Any], chosen: str) -> None:
    """Model first, then tensor parallelism, checkpoint group, other differences, name; in any order of the list."""
    facts = replace(FACTS, **changes)
    assert choose_policy(SHELF, facts).name == chosen
    assert choose_policy(reversed(SHELF), facts).name == chosen


def test_equally_close_policies_go_by_name() -> None:
    """The choice does not depend on the order of files."""
    twins = [policy(name, **MODEL, intermediate=64, tensor_parallel=4) for name in ("b", "a")]
    assert choose_policy(twins, FACTS).name == "a"


def test_a_contract_may_leave_the_ranks_open() -> None:
    """Its intermediate size is per rank, whatever the number of ranks; a named number is closer."""
    free = policy("a-free", **MODEL, intermediate=64)
    fixed = policy("fixed", **MODEL, intermediate=64, tensor_parallel=4)
    assert choose_policy([free, GENERIC], FACTS).name == "a-free"
    assert choose_policy([free, fixed, GENERIC], FACTS).name == "fixed"
    assert choose_policy([free, GENERIC], replace(FACTS, tensor_parallel=2)).name == "generic"


def test_a_single_policy_is_taken_as_it_is() -> None:
    """An operator who names one policy gets its verdict, also on layers that it does not fit."""
    assert choose_policy([SHELF[-1]], FACTS) is SHELF[-1]


def test_nothing_that_fits_is_an_error() -> None:
    """Without a generic policy the error names the layer and what there was."""
    with pytest.raises(PolicyError) as caught:
        choose_policy(SHELF[1:], replace(FACTS, hidden=64))
    (problem,) = caught.value.problems
    assert "layers.0" in problem
    assert "tp4-g128" in problem


@pytest.mark.parametrize("name", [p.name for p in shipped_policies()])
def test_every_shipped_policy_is_chosen_for_its_own_layer(name: str) -> None:
    """A layer as the contract has it; the generic policy for one that no contract has."""
    contract = load_policy(name).contract
    facts = replace(
        FACTS,
        hidden=contract.hidden,
        intermediate=contract.whole_intermediate,
        experts=contract.experts,
        top_k=contract.top_k,
        checkpoint_group=contract.weights.checkpoint_group,
    )
    assert choose_policy(shipped_policies(), facts).name == name
