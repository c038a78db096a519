"""The adapter's table of what vLLM has, against the sources of every version from 0.19.0 to 0.32.0 and of the fork.

`tests/data/make_vllm_symbols.py` wrote down what each lacks; no vLLM is needed here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm70_moe.engines.vllm import host
from sm70_moe.engines.vllm.host import APPLY, BY_NAME, FORK, METHOD, NEEDS, SUPPORTED, missing, refusal_text
from sm70_moe.engines.vllm.tree import Tree

RECORD = json.loads((Path(__file__).parents[1] / "data" / "vllm_symbols.json").read_text(encoding="utf-8"))
RELEASES = [
    "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0",
    "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
]  # fmt: skip
VERSIONS = [*RELEASES, FORK]


def has(version, target):
    return version not in RECORD["missing"][target]


def within(version, place):
    if version == FORK:
        return place.fork
    return RELEASES.index(place.first) <= RELEASES.index(version) <= RELEASES.index(place.last)


def test_every_version_was_looked_at():
    assert RECORD["versions"] == VERSIONS
    assert set(RECORD["missing"]) == {place.target for need in NEEDS for place in need.places}
    assert f"{RELEASES[0]} to {RELEASES[-1]}" in SUPPORTED


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_what_is_essential(version):
    lacks = [need.name for need in NEEDS if not need.without and not any(has(version, p.target) for p in need.places)]
    assert lacks == []


@pytest.mark.parametrize("version", VERSIONS)
def test_each_symbol_is_where_the_table_says(version):
    """The first place that a version has is the one whose versions name it; none where none does."""
    said, found = {}, {}
    for need in NEEDS:
        said[need.name] = [place.target for place in need.places if within(version, place)][:1]
        found[need.name] = [place.target for place in need.places if has(version, place.target)][:1]
    assert said == found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_calls_apply_as_ours_is_written(version):
    apply, create = (
        RECORD["parameters"][f"{METHOD}.{name}"][version].split(", ") for name in ("apply", "create_weights")
    )
    assert tuple(apply[:4]) == APPLY
    assert create == ["layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"]


def tree(folder, files):
    for name, text in files.items():
        place = folder.joinpath(*name.split("."))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_suffix(".py").write_text(text, encoding="utf-8")
    return Tree(folder)


def test_what_a_host_lacks_is_named_with_every_place(tmp_path):
    """A host with nothing lacks all that is essential, each once, and nothing that can be done without."""
    lack = missing(tree(tmp_path, {"vllm.version": "__version__ = '9'"}))
    essential = [need for need in NEEDS if not need.without]
    assert len(lack) == len(essential) + 1
    for text, need in zip(lack, essential, strict=False):
        assert text.startswith(need.name)
        assert all(place.target in text for place in need.places)
    text = refusal_text("9", lack[:1])
    assert all(part in text for part in ("9", lack[0], SUPPORTED))


SOURCE = """
from x import y as Z
import sys
if sys:
    def f(): ...
try:
    W: int = 1
except E:
    V = 2
class C(D):
    size: int = 1
    def m(self, p, q=1):
        self.inner = 1
        self.typed: int = 2
"""


def test_sources_are_read_as_python_binds_names(tmp_path):
    """Aliases, imports, conditions, fields and what methods assign; base classes are another's matter."""
    found = tree(tmp_path, {"a.b": SOURCE})
    there = ["a.b:Z", "a.b:f", "a.b:W", "a.b:V", "a.b:C", "a.b:C.size", "a.b:C.m", "a.b:C.inner", "a.b:C.typed"]
    assert [target for target in there if not found.has(target)] == []
    assert [target for target in ("a.b:y", "a.c:Z", "a.b:C.p", "a.b:D", "a.b:f.size") if found.has(target)] == []
    assert found.parameters("a.b:C.m") == ("p", "q")


def test_names_have_one_meaning():
    assert len(BY_NAME) == len(NEEDS)


class Mapper:
    def _map_name(self, key):
        return key.replace("old", "new")


def test_older_hosts_are_asked_by_their_names():
    from types import SimpleNamespace as Of

    assert host.mapped_name(Mapper(), "old.x") == "new.x"
    ranks = Of(tp_size=4)
    assert host.whole_intermediate(Of(intermediate_size_per_partition=192, moe_parallel_config=ranks)) == 768
    assert host.placement(Of(expert_placement_strategy="linear", num_fused_shared_experts=1)) == ("linear", 1)
    managed = Of(placement_strategy="round_robin", num_fused_shared_experts=0)
    assert host.placement(Of(expert_map_manager=managed)) == ("round_robin", 0)


def test_doctor_says_whether_the_adapter_fits(tmp_path):
    """By the sources that are installed, under whatever distribution; a host that lacks something is told what."""
    from sm70_moe.cli.doctor import vllm_text

    assert SUPPORTED in vllm_text(None)
    assert APPLY[0] in vllm_text(tree(tmp_path, {"vllm.version": "__version__ = '9'"}))
