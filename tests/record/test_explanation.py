"""What a reader sees: the table, its reasons and its memory line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sm70_moe.admission.admit import admit
from sm70_moe.facts import LayerFacts
from sm70_moe.plan.layergroup import collapse
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.record.explanation import build_line, explain, group_record, size_text
from sm70_moe.testing import contract_facts, fake_build, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")


def facts(index: int, **changes: object) -> LayerFacts:
    return contract_facts(FIRST, f"model.layers.{index}.mlp.experts", index=index, **changes)


def groups(**changes: object) -> list:
    machine = fake_machine((8, 0))
    return list(
        collapse(
            admit(
                FIRST, settings(), contract_facts(FIRST, f"model.layers.{i}.mlp.experts", index=i, **changes), machine
            )
            for i in range(48)
        )
    )


def test_table_names_route_outcome_and_every_reason() -> None:
    """A re-grouped checkpoint on an unsupported architecture: both reasons stand below the route."""
    text = explain(groups(checkpoint_group=128))
    lines = text.splitlines()
    assert lines[0].startswith(
        "model.layers.0-47.mlp.experts   48 layers   policy qwen3.8-flash-next-awq-tp4 (revision 3"
    )
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["qpn_m1"])
    assert "1 token" in lines[start]
    assert "fell back" in lines[start]
    assert any("expected 32, found 128" in line and line.endswith("GROUP_SIZE") for line in lines[start:])
    assert any("sm_80" in line and line.endswith("ARCH_MISSING") for line in lines[start:])
    assert any(line.startswith("  legacy ") and "otherwise" in line and "admitted" in line for line in lines)


def test_memory_line_counts_all_layers() -> None:
    """48 layers of 3-byte metadata take the contract's codes and metadata together."""
    last = explain(groups()).splitlines()[-1]
    assert "banks 16.70 GiB (3-byte metadata)" in last


EXACT = {"hidden": 2560, "intermediate": 160, "top_k": 10, "group": 32}


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"qpn": (EXACT,), "grouped": (EXACT,)}, ", kernels made for these sizes"),
        ({"qpn": (EXACT,), "grouped": (EXACT | {"hidden": 2048},)}, ", kernels for any sizes"),
        ({"qpn": (EXACT | {"group": 64},), "grouped": ()}, ", kernels for any sizes"),
        ({}, ""),
    ],
)
def test_build_line(sizes: dict, told: str) -> None:
    """Which build, and whether the admitted native routes have kernels for just these sizes."""
    build = replace(fake_build("cuda:0"), sizes=sizes)
    line = build_line(Plan(admit(FIRST, settings(), contract_facts(FIRST), fake_machine(build=build))))
    assert line == f"native build: {build.id[:16]}{told}"


def test_build_line_of_a_stale_build() -> None:
    """Said, and whole: where a record cannot be read, the text stands in the id's place."""
    build = replace(fake_build("cuda:0"), id="unreadable: /somewhere/BUILD.json is cut short", sizes={"qpn": (EXACT,)})
    line = build_line(Plan(admit(FIRST, settings(), contract_facts(FIRST), fake_machine(build=build))))
    assert line == "native build: stale, unreadable: /somewhere/BUILD.json is cut short"


def test_build_line_without_a_build() -> None:
    """None is there, or nobody looked."""
    none = fake_machine(build="missing")
    for machine, told in ((none, "none"), (replace(none, build_looked_up=False), "not looked for")):
        assert told in build_line(Plan(admit(FIRST, settings(), contract_facts(FIRST), machine)))


def test_record_is_plain_json() -> None:
    """The JSON form holds the same, and survives a round through JSON."""
    (group,) = groups()
    record = group_record(group)
    assert json.loads(json.dumps(record)) == record
    assert record["count"] == 48
    assert record["supported"] is True


def test_size_text() -> None:
    """Binary units, two digits for what fills a card."""
    assert [size_text(n) for n in (0, 1023, 1536, 3 * 2**20, 15 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "15.00 GiB",
    ]


def test_what_stops_everything_is_told_once() -> None:
    """A shard that no route can take is one finding above the routes, not one under each."""
    text = explain(groups(intermediate=64))
    assert text.count("gcd(16, 32) = 16") == 1
    assert "every feature" in text


def test_a_refusal_is_said_at_the_end() -> None:
    """A reader of the table learns that the engine would not start."""
    admission = admit(FIRST, settings({"qpn_m1": "1"}), facts(0), fake_machine((8, 0)))
    (group,) = collapse([admission])
    assert "an engine would refuse to start: qpn_m1" in explain([group])
    assert group_record(group)["refused"] == ["qpn_m1"]


def test_long_names_stay_apart_from_what_follows() -> None:
    """A check with a long name is not glued to its text."""
    admission = admit(FIRST, settings({"legacy_single_token": "0"}), facts(0), fake_machine())
    (group,) = collapse([admission])
    assert "needs legacy_single_token  expected admitted, found off" in explain([group])
