from __future__ import annotations

from itertools import combinations

from sm70_moe.policy import Difference, compare_policies, parse_policy, shipped_policies


def test_equal_policies_do_not_differ(base: str) -> None:
    """Where it was read is no difference."""
    assert compare_policies(parse_policy(base, "a"), parse_policy(base, "b")) == ()


def test_each_changed_key_is_named_with_both_values(base: str) -> None:
    """Values, absent keys and whole routes have their dotted path."""
    changed = (
        base.replace("hidden = 256", "hidden = 384")
        .replace("tokens = [2, 8]", "tokens = [2, 4]")
        .replace("alignment = 16 }", "alignment = 16, x_shape = [4, 384] }")
        .replace('doc = "Banks."', 'doc = "Banks."\nbatches = true')
    )
    assert compare_policies(parse_policy(base), parse_policy(changed)) == (
        Difference("contract.hidden", 256, 384),
        Difference("features.banks.batches", False, True),
        Difference("route.fast.tokens.last", 8, 4),
        Difference("route.fast.call.x_shape", None, [4, 384]),
    )


def test_another_order_of_routes_is_a_difference(base: str) -> None:
    """The same routes in another order differ in the list of names only."""
    one = '[[route]]\nname = "one"\nbackend = "legacy"\ntokens = 1\n'
    a = base.replace('[[route]]\nname = "fast"', one + '[[route]]\nname = "fast"')
    b = base.replace('[[route]]\nname = "legacy"', one + '[[route]]\nname = "legacy"')
    assert compare_policies(parse_policy(a), parse_policy(b)) == (
        Difference("routes", ["one", "fast", "legacy"], ["fast", "one", "legacy"]),
    )


def test_missing_evidence_is_a_difference(base: str) -> None:
    """A part that one side lacks shows as None there."""
    found = compare_policies(parse_policy(base[: base.index("[[evidence]]")]), parse_policy(base))
    assert {d.key: (d.a, d.b) for d in found}["evidence[0].claim"] == (None, "It is right.")


def test_policies_differ_exactly_if_their_digests_do() -> None:
    """For every pair of shipped policies."""
    for a, b in combinations(shipped_policies(), 2):
        assert a.digest != b.digest
        assert compare_policies(a, b)
    for policy in shipped_policies():
        assert compare_policies(policy, policy) == ()
