"""Alike layers are told once, with their range."""

from __future__ import annotations

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.plan.layergroup import collapse, ranges
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def admissions(count: int, odd: int | None = None) -> list:
    return [
        admit(
            FIRST,
            settings(),
            contract_facts(FIRST, f"model.layers.{i}.mlp.experts", index=i, checkpoint_group=128 if i == odd else 32),
            fake_machine(),
        )
        for i in range(count)
    ]


def test_all_alike() -> None:
    """48 equal layers are one group with the range in its name."""
    (group,) = collapse(admissions(48))
    assert (group.name, group.count, group.numbers) == ("model.layers.0-47.mlp.experts", 48, "0-47")


def test_odd_layer_stands_alone() -> None:
    """A layer that differs is named by itself, whatever stands around it."""
    groups = list(collapse(admissions(12, odd=1)))
    assert [g.name for g in groups] == ["model.layers.0,2-11.mlp.experts", "model.layers.1.mlp.experts"]


def test_layers_that_take_turns_are_two_groups() -> None:
    """Every second layer is another one: two groups, not one a layer."""
    odd, even = admissions(6, odd=1)[1], admissions(6)
    found = [even[0], odd, even[2], even[4]]
    assert [(g.count, g.numbers) for g in collapse(found)] == [(3, "0,2,4"), (1, "1")]


def test_no_layers_no_groups() -> None:
    """Nothing in, nothing out."""
    assert list(collapse([])) == []


@pytest.mark.parametrize(("indices", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 7), "0-2,7"), ((0, 2, 3), "0,2-3")])
def test_ranges(indices: tuple[int, ...], text: str) -> None:
    """Runs of numbers become FIRST-LAST."""
    assert ranges(indices) == text


def test_layers_of_two_stacks_stay_apart() -> None:
    """A layer of another stack is alike in all but its name, and is still named."""
    names = [("model.layers.0.mlp.experts", 0), ("model.layers.1.mlp.experts", 1), ("mtp.layers.0.mlp.experts", 0)]
    found = [admit(FIRST, settings(), contract_facts(FIRST, n, index=i), fake_machine()) for n, i in names]
    assert [g.name for g in collapse(found)] == ["model.layers.0-1.mlp.experts", "mtp.layers.0.mlp.experts"]


def test_only_the_last_number_that_is_the_index_is_collapsed() -> None:
    """The same number elsewhere in the name stays; layers whose other parts differ are other stacks."""
    names = [("model.1.layers.1.mlp.experts", 1), ("model.1.layers.2.mlp.experts", 2), ("model.2.layers.3.experts", 3)]
    found = [admit(FIRST, settings(), contract_facts(FIRST, n, index=i), fake_machine()) for n, i in names]
    assert [g.name for g in collapse(found)] == ["model.1.layers.1-2.mlp.experts", "model.2.layers.3.experts"]


def test_a_name_may_end_in_its_index_or_be_it() -> None:
    """The last part is one like the others."""
    for before in ("layers.", "model.3.", ""):
        names = [(f"{before}{i}", i) for i in (3, 4)]
        found = [admit(FIRST, settings(), contract_facts(FIRST, n, index=i), fake_machine()) for n, i in names]
        assert [g.name for g in collapse(found)] == [f"{before}3-4"]


def test_a_number_in_another_part_of_the_name_is_left_alone() -> None:
    """Only the part that is the index changes."""
    names = [(f"qwen3.layers.{i}.experts", i) for i in (3, 4, 5)]
    found = [admit(FIRST, settings(), contract_facts(FIRST, n, index=i), fake_machine()) for n, i in names]
    assert [g.name for g in collapse(found)] == ["qwen3.layers.3-5.experts"]
