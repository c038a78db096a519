"""Single keys: unknown, missing, of a wrong type or out of range."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Problems = Callable[..., list[tuple[str, int, str]]]

CALL = "contiguous = true, alignment = 16 }"


@pytest.mark.parametrize(
    ("old", "new", "path", "line", "accepted"),
    [
        ("schema = 1", "schema = 2", "schema", 1, "1"),
        ("schema = 1", "schema = true", "schema", 1, "whole number"),
        ("schema = 1", "schema = 1.0", "schema", 1, "whole number"),
        ('"base"', '"Base"', "name", 2, "[a-z0-9.-]+"),
        ('"base"', '"a/b"', "name", 2, "[a-z0-9.-]+"),
        ('"base"', '""', "name", 2, "[a-z0-9.-]+"),
        ('"base"', '"base\\n"', "name", 2, "[a-z0-9.-]+"),
        ("revision = 1", "revision = 0", "revision", 3, "at least 1"),
        ("revision = 1", "revision = true", "revision", 3, "whole number"),
        ("revision = 1", 'revision = "1"', "revision", 3, "whole number"),
        ("revision = 1", "revision = 1.0", "revision", 3, "whole number"),
        ('"A policy for tests"', '" "', "summary", 4, ""),
        ('"A policy for tests"', '"two\\nlines"', "summary", 4, ""),
        ('["sm_70"]', '["sm_70", "sm_7"]', "contract.architectures[1]", 7, "sm_"),
        ('["sm_70"]', '["volta"]', "contract.architectures[0]", 7, "sm_"),
        ('["sm_70"]', '"sm_70"', "contract.architectures", 7, "an array"),
        ("experts = 16", "experts = 0", "contract.experts", 9, "at least 1"),
        ("hidden = 256", "hidden = -256", "contract.hidden", 11, "at least 1"),
        ('"float16"\nweights', '"half"\nweights', "contract.activations", 13, "bfloat16"),
        ("bits = 4", "bits = 8", "contract.weights.bits", 14, "4"),
        ("bits = 4", "bits = 4.0", "contract.weights.bits", 14, "whole number"),
        ("bits = 4", "bits = 4, zero_point = 1", "contract.weights.zero_point", 14, "true or false"),
        ("bits = 4", 'bits = 4, format = "gguf"', "contract.weights.format", 14, "awq"),
        ("bits = 4", 'bits = 4, packing = "Gemv"', "contract.weights.packing", 14, "text that matches"),
        ('kind = "layout"', 'kind = "layot"', "features.banks.kind", 17, "layout"),
        ('doc = "Banks."', 'doc = "Ba\\nnks."', "features.banks.doc", 18, ""),
        ('doc = "Banks."', 'doc = "Banks."\nnative = 1', "features.banks.native", 19, "true or false"),
        ('doc = "Banks."', 'doc = "Banks."\nunset = "on"', "features.banks.unset", 19, "off"),
        ('doc = "Banks."', 'doc = "Banks."\nmetadata = "4-byte"', "features.banks.metadata", 19, "3-byte"),
        ('["VLLM_SM70_FAST"]', '["fast"]', "features.fast.env[0]", 22, "[A-Z]"),
        ('["VLLM_SM70_FAST"]', '"FAST"', "features.fast.env", 22, "an array"),
        ('backend = "indexed"', "backend = 1", "route[0].backend", 29, "text in quotes"),
        ("tokens = [2, 8]", "tokens = [8, 2]", "route[0].tokens", 30, "first at most last"),
        ("tokens = [2, 8]", "tokens = [2]", "route[0].tokens", 30, "[first, last]"),
        ("tokens = [2, 8]", "tokens = [2, true]", "route[0].tokens", 30, "[first, last]"),
        ("tokens = [2, 8]", "tokens = true", "route[0].tokens", 30, "[first, last]"),
        ("tokens = [2, 8]", 'tokens = "2-8"', "route[0].tokens", 30, "[first, last]"),
        ("tokens = [2, 8]", "tokens = 0", "route[0].tokens", 30, "from 1"),
        ("tokens = [2, 8]", "tokens = { from = 2, to = 8 }", "route[0].tokens.to", 30, "from"),
        ("tokens = [2, 8]", "tokens = { from = 0 }", "route[0].tokens.from", 30, "at least 1"),
        ("tokens = [2, 8]", "tokens = {}", "route[0].tokens.from", 30, ""),
        ('ids = "int32"', 'ids = "int8"', "route[0].call.ids", 31, "int64"),
        (CALL, "contiguous = 1, alignment = 16 }", "route[0].call.contiguous", 31, "true or false"),
        (CALL, "contiguous = true, alignment = 24 }", "route[0].call.alignment", 31, "power of two"),
        (CALL, "contiguous = true, alignment = 512 }", "route[0].call.alignment", 31, "256"),
        (CALL, "contiguous = true, alignment = 0 }", "route[0].call.alignment", 31, "at least 1"),
        (CALL, "contiguous = true, alignment = 16, x_shape = [2, 256, 1] }", "route[0].call.x_shape", 31, "2"),
        (CALL, "contiguous = true, alignment = 16, x_shape = [2] }", "route[0].call.x_shape[1]", 31, ""),
        (CALL, "contiguous = true }", "route[0].call.alignment", 31, "required"),
        ('source = "A test."\n', "", "evidence[0].source", 37, "required"),
        ('"A test."', '"A test."\nbound = { w2 = -1.0 }', "evidence[0].bound.w2", 41, "at least 0"),
        ('"A test."', '"A test."\nbound = { w2 = nan }', "evidence[0].bound.w2", 41, ""),
        ('"A test."', '"A test."\nbound = { w2 = true }', "evidence[0].bound.w2", 41, "a number"),
        ("[[evidence]]", '[on]\ndrift = "panic"\n[[evidence]]', "on.drift", 38, "raise"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(problems: Problems, old: str, new: str, path: str, line: int, accepted: str) -> None:
    """One problem, with key path and line, and with what is accepted."""
    ((found, at, text),) = problems((old, new))
    assert (found, at) == (path, line)
    assert accepted in text.split("accepted", 1)[1]


@pytest.mark.parametrize(
    ("old", "new", "path", "nearest"),
    [
        ("[contract]", "digest = 'x'\n[contract]", "digest", None),
        ("[contract]", "origin = 'x'\n[contract]", "origin", None),
        ("[contract]", "routes = []\n[contract]", "routes", "route"),
        ("[contract]", "[contract]\nintermedate = 3", "contract.intermedate", "intermediate"),
        ("bits = 4", "bits = 4, zeropoint = true", "contract.weights.zeropoint", "zero_point"),
        ('doc = "Banks."', 'doc = "Banks."\nnatve = true', "features.banks.natve", "native"),
        ("tokens = [2, 8]", "tokens = [2, 8]\nbackends = 1", "route[0].backends", "backend"),
        (CALL, "contiguous = true, alignment = 16, xshape = 3 }", "route[0].call.xshape", "x_shape"),
        ("[[evidence]]", "[on]\ndrft = 'warn'\n[[evidence]]", "on.drft", "drift"),
        ('"A test."', '"A test."\nlimit = "x"', "evidence[0].limit", "limits"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(
    problems: Problems, old: str, new: str, path: str, nearest: str | None
) -> None:
    """No unknown key is accepted anywhere; the nearest known one is named if there is one."""
    ((found, _, text),) = problems((old, new))
    assert found == path
    if nearest is not None:
        assert f'accepted "{nearest}"' in text


@pytest.mark.parametrize("name", ["Fast", "fa-st", "9fast", "fa.st"])
def test_feature_names_can_be_variables(problems: Problems, name: str) -> None:
    """A name that cannot stand in SM70_MOE_<NAME> is refused where it is declared."""
    found = problems(("[features.fast]", f"[features.{name!r}]"), ('feature = "fast"', f"feature = {name!r}"))
    assert (f"features.{name}", 20) in [(path, line) for path, line, _ in found]


def test_a_misspelt_check_suggests_the_nearest(problems: Problems) -> None:
    """The word is named at its place in the array."""
    ((path, line, text),) = problems(('doc = "Banks."', 'doc = "Banks."\nchecks = [\n"bits",\n"geometri",\n]'))
    assert (path, line) == ("features.banks.checks[1]", 21)
    assert 'accepted "geometry"' in text


def test_a_valid_policy_has_no_problems(problems: Problems) -> None:
    """The policy that the other tests change is fine."""
    assert problems() == []
