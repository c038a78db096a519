from __future__ import annotations

import copy
import pickle
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from sm70_moe.policy import Check, Policy, load_policy, parse_policy

REFORMATTED = """\
# other comments, other order, other spelling of the same values
evidence = [{ limits = "None.", source = "A test.", claim = 'It is right.', route = "fast" }]
summary = 'A policy for tests'
name = \"\"\"base\"\"\"
revision = 0x1
schema = 1

[[route]]
call.alignment = 1_6
call.contiguous = true
call.weights = "float32"
call.ids = "int32"
call.x = "float16"
tokens = [
  2,
  8,  # both included
]
backend = "indexed"
feature = "fast"
name = "fast"

[[route]]
backend = "legacy"
name = "legacy"
tokens = { from = 1 }

[features.fast]
doc = "Fast."
needs = ["banks"]
env = ["VLLM_SM70_FAST"]
kind = "route"
unset = "auto"
native = false

[features]
banks = { doc = "Banks.", kind = "layout" }

[contract.weights]
prepared_group = 32
checkpoint_group = 128
bits = 4

[contract]
activations = "float16"
intermediate = 64
hidden = 256
top_k = 2
experts = 16
tensor_parallel = 4
architectures = ["sm_70"]

[on]
drift = "warn"
"""


def test_the_digest_ignores_form(base: str) -> None:
    """Comments, order of keys, quotes, spelled-out defaults and the file's place do not count."""
    a, b = parse_policy(base, "a.toml"), parse_policy(REFORMATTED, "b.toml")
    assert a.digest == b.digest
    assert a.record() == b.record()
    assert (a.origin, b.origin) == ("a.toml", "b.toml")


def test_a_changed_copy_has_a_digest_and_orders_of_its_own(base: str) -> None:
    """What was worked out before it was copied speaks of the original's fields."""
    policy = parse_policy(base, "a.toml")
    before = policy.digest, policy.order_of_need, policy.reading_order
    bare = policy.model_copy(update={"features": {}, "routes": policy.routes[-1:]})
    assert bare.digest != before[0]
    assert (bare.order_of_need, bare.reading_order) == ((), ("legacy",))
    assert (policy.digest, policy.order_of_need, policy.reading_order) == before
    assert policy.model_copy().digest == policy.digest


def test_the_digest_is_pinned(base: str) -> None:
    """Ranks and records compare digests across versions: it changes with the schema, or with what a file means only."""
    assert parse_policy(base).digest == "7f27379bb37e27e6f2b3bac9e239c827ab08a270532139049a842d73120688ad"


def test_checks_are_a_set(base: str) -> None:
    """Shorthands, order and repetition of checks do not change the digest; a check more does."""

    def digest(checks: str) -> str:
        return parse_policy(base.replace('doc = "Fast."', f'doc = "Fast."\nchecks = {checks}')).digest

    assert digest('["geometry", "bits"]') == digest('["bits", "intermediate", "hidden", "bits"]')
    assert digest('["geometry", "bits"]') != digest('["geometry"]')


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("revision = 1", "revision = 2"),
        ('"A policy for tests"', '"Another policy"'),
        ('["sm_70"]', '["sm_70", "sm_90"]'),
        ("bits = 4", "bits = 4, zero_point = true"),
        ('kind = "layout"', 'kind = "layout"\nunset = "off"'),
        ('["VLLM_SM70_FAST"]', '["VLLM_SM70_FAST", "VLLM_SM70_FASTER"]'),
        ("tokens = [2, 8]", "tokens = [2, 9]"),
        ("alignment = 16", "alignment = 32"),
        ("[[evidence]]", '[on]\ndrift = "raise"\n[[evidence]]'),
        ('"None."', '"Many."'),
        ("[features.banks]", "[features.banks2]"),
    ],
)
def test_the_digest_follows_content(base: str, old: str, new: str) -> None:
    """Whatever a reader of the policy would act on changes the digest."""
    changed = base.replace(old, new).replace('"banks"', '"banks2"' if "banks2" in new else '"banks"')
    assert parse_policy(changed).digest != parse_policy(base).digest


def test_the_order_of_routes_counts(base: str) -> None:
    """Routes are tried in order, so that swapping two is another policy."""
    one = '[[route]]\nname = "one"\nbackend = "legacy"\ntokens = 1\n'
    two = '[[route]]\nname = "two"\nbackend = "legacy"\ntokens = 2\n'
    before, after = base.split('[[route]]\nname = "legacy"')
    texts = (f'{before}{pair}[[route]]\nname = "legacy"{after}' for pair in (one + two, two + one))
    assert len({parse_policy(text).digest for text in texts}) == 2


def test_features_keep_their_declared_order(base: str) -> None:
    """A reader sees the features as the author listed them."""
    assert list(parse_policy(base).features) == ["banks", "fast"]
    assert list(parse_policy(REFORMATTED).features) == ["fast", "banks"]


def test_absent_values_accept_anything() -> None:
    """The generic policy leaves sizes, machine and layout open."""
    contract = load_policy("generic-awq").contract
    assert contract.any_geometry
    assert contract.architectures is None
    assert contract.weights.checkpoint_group is None
    assert contract.whole_intermediate is None


def test_whole_intermediate_counts_all_ranks(base: str) -> None:
    """Per rank times ranks."""
    assert parse_policy(base).contract.whole_intermediate == 256


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "name", "x"),
        lambda p: setattr(p.contract, "hidden", 1),
        lambda p: setattr(p.routes[0].tokens, "last", 9),
        lambda p: p.features.__setitem__("x", 1),
        lambda p: p.features.__delitem__("banks"),
        lambda p: p.features.update(x=1),
        lambda p: p.features.setdefault("x", 1),
        lambda p: p.features.pop("banks"),
        lambda p: p.features.popitem(),
        lambda p: p.features.clear(),
        lambda p: p.features.__ior__({"x": 1}),
    ],
)
def test_a_policy_cannot_change(base: str, change: Callable[[Policy], Any]) -> None:
    """Neither attributes nor mappings can be set, and the digest stays true."""
    policy = parse_policy(base)
    with pytest.raises((ValidationError, TypeError)):
        change(policy)
    assert policy.digest == parse_policy(base).digest


def test_a_policy_travels(base: str) -> None:
    """Pickling and copying give an equal policy that is frozen as well."""
    policy = parse_policy(base, "somewhere")
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert other == policy
        assert hash(other) == hash(policy)
        assert other.origin == "somewhere"
        features: Any = other.features
        with pytest.raises(TypeError):
            features["x"] = policy.features["banks"]


def test_a_document_in_memory_is_a_policy(base: str) -> None:
    """A parsed document makes the same policy without a file."""
    policy = Policy.model_validate(tomllib.loads(base))
    assert policy.digest == parse_policy(base).digest
    assert policy.origin == ""


def test_reactions_default_to_the_cautious_ones(base: str) -> None:
    """Refuse mixed models, fall back where ranks disagree, warn of drift."""
    on = parse_policy(base).on
    assert (on.mixed_model, on.disagreement, on.drift) == ("refuse", "fall-back", "warn")


def test_shorthands_expand() -> None:
    """`contract` is every check, `geometry` the two sizes of the matrices."""
    features = load_policy("qwen3.8-flash-next-awq-tp4").features
    assert features["qpn_m1"].checks == tuple(Check)
    assert features["compact_metadata"].checks == (Check.HIDDEN, Check.INTERMEDIATE, Check.PREPARED_GROUP)
