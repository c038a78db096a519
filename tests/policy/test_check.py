"""Rules between the parts of a policy: each has a case in which only it is broken."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from sm70_moe.errors import PolicyError
from sm70_moe.kernels.declared import capability
from sm70_moe.policy import declarations, parse_policy

Problems = Callable[..., list[tuple[str, int, str]]]
Edit = tuple[str, str]

CALL = "contiguous = true, alignment = 16 }"
LAST = '[[route]]\nname = "legacy"\nbackend = "legacy"\n'
FAST = '[[route]]\nname = "fast"\nfeature = "fast"\nbackend = "indexed"\ntokens = [2, 8]\n'


def shape(text: str) -> Edit:
    return CALL, f"contiguous = true, alignment = 16, {text} }}"


def routes(text: str) -> Edit:
    """More routes before the last one."""
    return LAST, text + LAST


COVERAGE = {
    "conditional tokens": (
        [(LAST, LAST + "tokens = { from = 9 }\n")],
        [("route", "1 tokens"), ("route", "2-8 tokens")],
    ),
    "gap": (
        [(LAST, LAST + "tokens = { from = 12 }\n")],
        [("route", "1 tokens"), ("route", "9-11 tokens"), ("route", "2-8 tokens")],
    ),
    "last has a flag": (
        [(LAST, LAST + 'feature = "fast"\n')],
        [("route", "1 and more tokens"), ("route[1]", "feature")],
    ),
    "last has conditions": (
        [(LAST, LAST + 'call = { x = "float16", ids = "int32", weights = "float32", ' + CALL + "\n")],
        [("route", "1 and more tokens"), ("route[1]", "call")],
    ),
    "last has an end": (
        [(LAST, LAST + "tokens = [1, 99]\n")],
        [("route", "100 and more tokens"), ("route[1]", "tokens")],
    ),
    "unreachable": (
        [routes('[[route]]\nname = "all"\nbackend = "legacy"\n')],
        [("route[2]", "all")],
    ),
    "unreachable behind two": (
        [
            (
                FAST,
                '[[route]]\nname = "a"\nbackend = "legacy"\ntokens = [1, 4]\n'
                '[[route]]\nname = "b"\nbackend = "legacy"\ntokens = [5, 8]\n' + FAST,
            )
        ],
        [("route[2]", "a, b")],
    ),
    "duplicate": (
        [
            routes(
                '[[route]]\nname = "again"\nfeature = "fast"\nbackend = "indexed"\ntokens = 8\n'
                'call = { x = "float16", ids = "int32", weights = "float32", ' + CALL + "\n"
            )
        ],
        [("route[1].tokens", "2-8")],
    ),
    "another bank order": (
        [('backend = "indexed"', 'backend = "indexed"\norder = "octet32"'), (LAST, LAST + 'order = "tile32x8"\n')],
        [("route[1].order", '"octet32"')],
    ),
    "an order that the backend does not read": (
        [('backend = "indexed"', 'backend = "indexed"\norder = "rows"'), (LAST, LAST + 'order = "rows"\n')],
        [("route[1].order", "which backend legacy reads")],
    ),
}

RELATIONS = {
    "unknown need": ([('["banks"]', '["bnks"]')], [("features.fast.needs[0]", 'accepted "banks"')]),
    "need of itself": ([('["banks"]', '["banks", "fast"]')], [("features.fast.needs", "fast -> fast")]),
    "needs in a ring": (
        [('doc = "Banks."', 'doc = "Banks."\nneeds = ["fast"]')],
        [("features.banks.needs", "banks -> fast -> banks")],
    ),
    "route feature without a route": (
        [("[features.fast]", '[features.slow]\nkind = "route"\ndoc = "Slow."\n[features.fast]')],
        [("features.slow", "route")],
    ),
    "route of a layout feature": (
        [('feature = "fast"', 'feature = "banks"')],
        [("features.fast", "route"), ("route[0].name", '"fast"'), ("route[0].feature", "layout")],
    ),
    "route of an unknown feature": (
        [('feature = "fast"', 'feature = "fst"')],
        [("features.fast", "route"), ("route[0].name", '"fast"'), ("route[0].feature", 'accepted "fast"')],
    ),
    "route of an unknown feature behind one without": (
        [
            routes('[[route]]\nname = "free"\nbackend = "legacy"\ntokens = 1\n'),
            routes(FAST.replace('"fast"', '"slow"', 1).replace('"fast"', '"slw"')),
        ],
        [("route[2].feature", '"slw"')],
    ),
    "route named like a feature": ([('"legacy"\nbackend', '"banks"\nbackend')], [("route[1].name", '"banks"')]),
    "two routes of one name": (
        [routes('[[route]]\nname = "legacy"\nbackend = "legacy"\ntokens = 1\n')],
        [("route[2].name", '"legacy"')],
    ),
    "one variable twice": (
        [('doc = "Banks."', 'doc = "Banks."\nenv = ["VLLM_SM70_FAST"]')],
        [("features.fast.env[0]", "banks")],
    ),
    "one variable twice in a feature": (
        [('["VLLM_SM70_FAST"]', '["VLLM_SM70_FAST", "VLLM_SM70_FAST"]')],
        [("features.fast.env[1]", "VLLM_SM70_FAST")],
    ),
    "variable of another feature's name": (
        [('["VLLM_SM70_FAST"]', '["SM70_MOE_BANKS"]')],
        [("features.fast.env[0]", "banks")],
    ),
    "variable of a setting": (
        [('["VLLM_SM70_FAST"]', '["SM70_MOE_STRICT"]')],
        [("features.fast.env[0]", "SM70_MOE_STRICT, which the setting strict has")],
    ),
    "other name of a setting": (
        [('["VLLM_SM70_FAST"]', '["VLLM_SM70_AWQ_MOE_BATCHED_LAYER_DENYLIST"]')],
        [("features.fast.env[0]", "the setting layer_deny")],
    ),
    "variable of the package's build": (
        [('["VLLM_SM70_FAST"]', '["SM70_MOE_BUILD_KERNELS"]')],
        [("features.fast.env[0]", "the build of the package")],
    ),
    "implied variable of a shipped flag": (
        [('["VLLM_SM70_FAST"]', '["SM70_MOE_QPN_M1"]')],
        [("features.fast.env[0]", "the flag qpn_m1")],
    ),
    "variable that nobody reads": (
        [('["VLLM_SM70_FAST"]', '["FAST"]')],
        [("features.fast.env[0]", "SM70_MOE_ or VLLM_SM70_")],
    ),
    "variable whose prefix is only like ours": (
        [('["VLLM_SM70_FAST"]', '["VLLM_SM7_FAST"]')],
        [("features.fast.env[0]", "SM70_MOE_ or VLLM_SM70_")],
    ),
    "feature named like a setting": (
        [("[features.banks]", "[features.strict]"), ('needs = ["banks"]', 'needs = ["strict"]')],
        [("features.strict", "the setting strict")],
    ),
    "unknown backend": ([('"indexed"', '"indexd"')], [("route[0].backend", 'accepted "indexed"')]),
    "evidence for nothing": ([('"fast"\nclaim', '"fats"\nclaim')], [("evidence[0].route", 'accepted "fast"')]),
    "metadata of a route": (
        [('doc = "Fast."', 'doc = "Fast."\nmetadata = "3-byte"')],
        [("features.fast.metadata", "layout")],
    ),
    "batches of a route": ([('doc = "Fast."', 'doc = "Fast."\nbatches = true')], [("features.fast.batches", "layout")]),
}

GEOMETRY = {
    "hidden not in tiles": (
        [
            ("hidden = 256", "hidden = 272"),
            ("checkpoint_group = 128, prepared_group = 32", "zero_point = true"),
            ('backend = "indexed"', 'backend = "indexed"\norder = "tile32x8"'),
            (LAST, LAST + 'order = "tile32x8"\n'),
        ],
        [("contract.hidden", "272 % 32 = 16")],
    ),
    "intermediate not in blocks of an octet bank": (
        [
            ("intermediate = 64", "intermediate = 48"),
            ("checkpoint_group = 128, prepared_group = 32", "bits = 4"),
            ("bits = 4, bits", "bits"),
            (LAST, LAST + 'order = "octet32"\n'),
            ("tokens = [2, 8]\n", 'tokens = [2, 8]\norder = "octet32"\n'),
        ],
        [("contract.intermediate", "48 % 32 = 16")],
    ),
    "intermediate not in tiles": (
        [
            ("intermediate = 64", "intermediate = 40"),
            ("checkpoint_group = 128, prepared_group = 32", "bits = 4"),
            ("bits = 4, bits", "bits"),
            ('backend = "indexed"', 'backend = "indexed"\norder = "tile32x8"'),
            (LAST, LAST + 'order = "tile32x8"\n'),
        ],
        [("contract.intermediate", "40 % 16 = 8")],
    ),
    "checkpoint group against hidden": ([("hidden = 256", "hidden = 320")], [("contract.hidden", "320 % 128 = 64")]),
    "checkpoint group against the whole intermediate": (
        [("tensor_parallel = 4", "tensor_parallel = 3")],
        [("contract.intermediate", "192 % 128 = 64")],
    ),
    "prepared group against a rank": (
        [("prepared_group = 32", "prepared_group = 128")],
        [("contract.intermediate", "64 % 128 = 64")],
    ),
    "prepared group against hidden": (
        [
            ("checkpoint_group = 128, prepared_group = 32", "prepared_group = 192"),
            ("intermediate = 64", "intermediate = 192"),
        ],
        [("contract.hidden", "256 % 192 = 64")],
    ),
    "prepared group too fine": (
        [("prepared_group = 32", "prepared_group = 16")],
        [("contract.weights.prepared_group", "32")],
    ),
    "prepared group no divisor": (
        [("checkpoint_group = 128, prepared_group = 32", "checkpoint_group = 32, prepared_group = 64")],
        [("contract.weights.prepared_group", "32")],
    ),
    "more choices than experts": ([("top_k = 2", "top_k = 17")], [("contract.top_k", "16")]),
    "experts over ranks": (
        [("experts = 16", "experts = 16\nexpert_parallel = 3")],
        [("contract.experts", "16 % 3 = 1")],
    ),
    "call in another dtype": ([('x = "float16"', 'x = "bfloat16"')], [("route[0].call.x", '"float16"')]),
    "x of another width": ([shape("x_shape = [2, 128]")], [("route[0].call.x_shape[1]", "256")]),
    "ids of another width": ([shape("ids_shape = [2, 3]")], [("route[0].call.ids_shape[1]", "2")]),
    "weights of another width": ([shape("weights_shape = [8, 8]")], [("route[0].call.weights_shape[1]", "2")]),
    "x for other tokens": ([shape("x_shape = [9, 256]")], [("route[0].call.x_shape[0]", "2-8")]),
    "shapes for different tokens": (
        [shape("x_shape = [2, 256], ids_shape = [3, 2]")],
        [("route[0].call.ids_shape[0]", "2 tokens")],
    ),
}


@pytest.mark.parametrize(
    ("edits", "expected"),
    [pytest.param(*case, id=name) for name, case in (COVERAGE | RELATIONS | GEOMETRY).items()],
)
def test_a_broken_rule_is_named(
    problems: Problems, edits: list[Edit], expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly these problems, each at its key, with the value or name that tells why.

    What the backend of the first route is declared to run is left out: test_declarations.py has such rules.
    """
    monkeypatch.setattr(declarations, "capability", lambda name: None if name == "indexed" else capability(name))
    found = problems(*edits)
    assert sorted(path for path, _, _ in found) == sorted(path for path, _ in expected)
    for path, value in expected:
        assert any(at == path and value in text for at, _, text in found)
    for _, _, text in found:  # what was found and what is accepted, each with words
        assert re.search(r"found (?!accepted)\S.*, accepted (?!accepted)\S", text)
        assert not re.search(r"\b(None|null)\b", text)


@pytest.mark.parametrize("key", ["feature", "tokens", "call"])
def test_routes_with_other_faults_are_still_held_against_each_others_order(problems: Problems, key: str) -> None:
    """Feature, tokens and call say nothing about the order of the banks; all three wrong neither."""
    wrong = {
        "feature": ('feature = "fast"', "feature = 1"),
        "tokens": ("[2, 8]", '"x"'),
        "call": ('x = "float16"', "x = 1"),
    }
    order = (LAST, LAST + 'order = "octet32"\n')
    for edits in ([wrong[key]], list(wrong.values())):
        assert "route[1].order" in [path for path, _, _ in problems(*edits, order)]


FINE: dict[str, list[Edit]] = {
    "an unconditional route before the last": [routes('[[route]]\nname = "one"\nbackend = "reference"\ntokens = 1\n')],
    "the same tokens under other conditions": [
        routes('[[route]]\nname = "again"\nfeature = "fast"\nbackend = "grouped"\ntokens = 8\n')
    ],
    "a last route that begins where another ends": [
        (LAST, '[[route]]\nname = "few"\nbackend = "legacy"\ntokens = [1, 8]\n' + LAST + "tokens = { from = 9 }\n")
    ],
    "equal groups": [("checkpoint_group = 128, prepared_group = 32", "checkpoint_group = 64, prepared_group = 64")],
    "one group for a whole matrix": [("hidden = 256", "hidden = 128")],
    "shapes that fit": [shape("x_shape = [8, 256], ids_shape = [8, 2], weights_shape = [8, 2]")],
    "shapes without a contract": [
        ("hidden = 256\n", ""),
        ("top_k = 2\n", ""),
        ('activations = "float16"\n', ""),
        shape("x_shape = [8, 77], ids_shape = [8, 3]"),
    ],
    "its own implied variable": [('["VLLM_SM70_FAST"]', '["SM70_MOE_FAST"]')],
    "all orders changed": [
        ('backend = "indexed"', 'backend = "indexed"\norder = "tile32x8"'),
        (LAST, LAST + 'order = "tile32x8"\n'),
    ],
}


@pytest.mark.parametrize("edits", [pytest.param(edits, id=name) for name, edits in FINE.items()])
def test_what_looks_close_is_fine(problems: Problems, edits: list[Edit]) -> None:
    """The rules refuse nothing that works."""
    assert problems(*edits, backends=("legacy", "indexed", "grouped", "reference")) == []


def test_a_policy_needs_a_route(base: str) -> None:
    """An empty route list is one problem, and stands at its key."""
    text = "route = []\n" + base[: base.index("[features.fast]")]
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "FILE")
    assert [problem.split(": ")[:2] for problem in caught.value.problems] == [["FILE:1", "route"]]


@pytest.mark.parametrize(
    ("edit", "paths"),
    [
        (("tokens = [2, 8]", 'tokens = "2-8"'), ["route[0].tokens"]),
        (("tokens = [2, 8]", "token = [2, 8]"), ["route[0].token"]),
        (('backend = "indexed"\n', ""), ["route[0].backend"]),
        (('backend = "legacy"', "backend = 1"), ["route[1].backend"]),
        (("alignment = 16", "alignment = 24"), ["route[0].call.alignment"]),
    ],
)
def test_a_faulty_route_raises_no_false_alarm(problems: Problems, edit: Edit, paths: list[str]) -> None:
    """What follows only from a key that is reported anyway is not reported."""
    assert [path for path, _, _ in problems(edit)] == paths


def test_a_faulty_route_hides_no_fault_of_another(problems: Problems) -> None:
    """Gaps are still found when an order is wrong, a wrong order when another route has wrong tokens."""
    last = (LAST, LAST + 'tokens = [1, 99]\norder = "tile32x8"\n')
    assert [path for path, _, _ in problems(('backend = "indexed"', 'backend = "indexed"\norder = 1'), last)] == [
        "route",
        "route[0].order",
        "route[1]",
    ]
    assert [path for path, _, _ in problems(("tokens = [2, 8]", "tokens = 0"), last)] == [
        "route[0].tokens",
        "route[1].order",
    ]


def test_rings_are_reported_once_each(base: str) -> None:
    """Two rings that share a feature are told apart; what merely leads into one is not in it."""
    feature = '[features.{}]\nkind = "option"\ndoc = "x"\nneeds = {}\n'
    text = base + "".join(
        feature.format(name, needs)
        for name, needs in (("lead", ["a"]), ("a", ["b", "c"]), ("b", ["a"]), ("c", ["d"]), ("d", ["c"]))
    )
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "FILE")
    found = [problem.split(": ", 2)[1:] for problem in caught.value.problems]
    assert [path for path, _ in found] == ["features.a.needs", "features.c.needs"]
    assert "a -> b -> a" in found[0][1]
    assert "c -> d -> c" in found[1][1]


@pytest.mark.parametrize(
    ("backends", "paths"),
    [(("legacy", "indexed"), []), (("legacy",), ["route[0].backend"]), ((), ["route[0].backend", "route[1].backend"])],
)
def test_given_backends_are_the_only_ones(problems: Problems, backends: tuple[str, ...], paths: list[str]) -> None:
    """What the caller lists replaces the registered names."""
    assert [path for path, _, _ in problems(backends=backends)] == paths
