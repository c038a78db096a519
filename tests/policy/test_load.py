from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sm70_moe.errors import PolicyError
from sm70_moe.policy import load_policies, load_policy, parse_policy, policies_folder, shipped_policies
from sm70_moe.policy.check import check

FAULTY = """\
schema = 1
name = "Bad Name"
revision = true
sumary = "x"

[contract]
hidden = 2592
intermediate = 160
experts = 4
top_k = 10
weights = { bits = 8,  checkpoint_group = 32, prepared_group = 16 }

[features.a]
kind = "route"
needs = [
  "b",  # fine
  "bb",
]
checks = ["geometry", "contrct"]
native = 1
doc = "x"

[features.b]
kind = "layot"
natve = true

[[route]]
name = "a"
feature = "a"
backend = "qpm"
tokens = [8, 2]

[[route]]
name = "legacy"
backend = "legacy"
call = { x = "float16", ids = "int32", weights = "float32", contiguous = true, alignment = 24 }

[[evidence]]
route = "nope"
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "FILE")
    return ["".join(problem.split(": ")[:2]) for problem in caught.value.problems]


def test_all_problems_are_reported_at_once() -> None:
    """Faults of single keys and between parts come together, in the order of the file."""
    assert problems_of(FAULTY) == [
        "FILE:1summary",
        "FILE:2name",
        "FILE:3revision",
        "FILE:4sumary",
        "FILE:10contract.top_k",
        "FILE:11contract.weights.bits",
        "FILE:11contract.weights.prepared_group",
        "FILE:17features.a.needs[1]",
        "FILE:19features.a.checks[1]",
        "FILE:20features.a.native",
        "FILE:23features.b.doc",
        "FILE:24features.b.kind",
        "FILE:25features.b.natve",
        "FILE:30route[0].backend",
        "FILE:31route[0].tokens",
        "FILE:36route[1].call.alignment",
        "FILE:38evidence[0].claim",
        "FILE:38evidence[0].source",
        "FILE:38evidence[0].limits",
        "FILE:39evidence[0].route",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("schema = 1\nname = \n", 2),
        ('schema = 1\n\nname = "x\n', 3),
        ("a = 1\na = 2\n", 2),
        ("a = [1,\n", 2),
        ("a = 1" + "0" * 5000, 1),
    ],
    ids=["no value", "open string", "twice", "end of file", "number too long"],
)
def test_text_that_is_not_toml_names_its_line(text: str, line: int) -> None:
    """A syntax error is one problem with file and line."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "FILE")
    (problem,) = caught.value.problems
    assert problem.startswith(f"FILE:{line}: not TOML")


def test_endless_nesting_is_a_problem() -> None:
    """Brackets beyond the parser's depth end in an error of ours."""
    with pytest.raises(PolicyError, match=r"^FILE:"):
        parse_policy("a = " + "[" * 100_000, "FILE")


@pytest.mark.parametrize(
    "text",
    ["", "features = 3", "route = 'x'", "route = [1, 2]", "contract = []", "evidence = {}", "features = { a = 1 }"],
)
def test_documents_of_another_shape_are_refused(text: str) -> None:
    """Values of a wrong kind at the top are problems, never a crash."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "FILE")
    assert any("schema: missing key" in problem for problem in caught.value.problems)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text('ab_\n."', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "from", "x"]), inner),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a document."""
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in pairs] + [place for _, item in pairs for place in places(item)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_value_anywhere_breaks_the_check(base: str, data: st.DataObject) -> None:
    """Whatever stands at one or two keys, the answer is a policy or a list of faults that can be printed."""
    document = tomllib.loads(base)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(document)))
        container[key] = data.draw(anything)
    policy, faults = check(document, "FILE", None)
    assert (policy is not None) or faults
    assert all(fault.text for fault in faults)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_cut_in_the_text_breaks_loading(base: str, data: st.DataObject) -> None:
    """A file with a piece missing loads, or ends in problems that all name the file."""
    start = data.draw(st.integers(0, len(base)))
    text = base[:start] + base[start + data.draw(st.integers(1, 60)) :]
    problems: tuple[str, ...] = ()
    try:
        parse_policy(text, "FILE")
    except PolicyError as error:
        problems = error.problems or ("none",)
    assert all(problem.startswith("FILE:") for problem in problems)


def test_one_named_policy_or_all_shipped_ones() -> None:
    """What settings and commands load."""
    assert [policy.name for policy in load_policies("generic-awq")] == ["generic-awq"]
    assert load_policies(None) == shipped_policies()


def test_a_path_is_read_and_kept_as_origin(tmp_path: Path, base: str) -> None:
    """Text and path objects are both accepted, and the policy remembers where it was read."""
    path = tmp_path / "mine.toml"
    path.write_text(base)
    assert load_policy(path).origin == str(path)
    assert load_policy(str(path)).name == "base"


def test_a_name_with_a_separator_is_a_path(tmp_path: Path, base: str) -> None:
    """A file needs no .toml at its end if the path has a separator."""
    (tmp_path / "mine").write_text(base)
    assert load_policy(f"{tmp_path}/mine").name == "base"


def test_an_unknown_name_suggests_the_nearest() -> None:
    """The error names what was asked for, the shipped names, and the likely one first."""
    with pytest.raises(PolicyError) as caught:
        load_policy("gneric-awq")
    (problem,) = caught.value.problems
    assert "'gneric-awq'" in problem
    assert 'accepted "generic-awq"' in problem
    assert "qwen3.8-flash-next-awq-tp4" in problem


@pytest.mark.parametrize("name", ["missing.toml", "folder.toml", "secret.toml", "nul\0.toml"])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, a folder, a file without permission and an impossible path are all problems."""
    (tmp_path / "folder.toml").mkdir()
    if name == "secret.toml":  # an administrator may read every file, so permission bits prove nothing

        def deny(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(PolicyError) as caught:
        load_policy(tmp_path / name)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{tmp_path / name}: cannot be read")


def test_other_encodings_are_refused_with_the_line(tmp_path: Path) -> None:
    """A byte that is not UTF-8 is named with its line."""
    path = tmp_path / "latin.toml"
    path.write_bytes(b"schema = 1\nsummary = 'f\xfcr'\n")
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}:2: not UTF-8")
    assert "0xfc" in problem


def test_broken_shipped_files_are_all_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two broken files of the folder give the problems of both."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text("schema = ")
    monkeypatch.setattr("sm70_moe.policy.load.policies_folder", lambda: tmp_path)
    with pytest.raises(PolicyError) as caught:
        shipped_policies()
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        str(tmp_path / "a.toml"),
        str(tmp_path / "b.toml"),
    ]


def test_an_incomplete_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a policies folder the error says where it was looked for."""
    monkeypatch.setattr("sm70_moe.policy.load.__file__", str(tmp_path / "sm70_moe" / "policy" / "load.py"))
    with pytest.raises(PolicyError) as caught:
        policies_folder()
    assert str(tmp_path / "sm70_moe" / "policies") in caught.value.problems[0]


def test_the_installed_folder_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the package first, then beside it."""
    inside, beside = tmp_path / "sm70_moe" / "policies", tmp_path / "policies"
    monkeypatch.setattr("sm70_moe.policy.load.__file__", str(tmp_path / "sm70_moe" / "policy" / "load.py"))
    for folder in (beside, inside):
        folder.mkdir(parents=True)
        (folder / "schema.json").write_text("{}")
        assert policies_folder() == folder


def test_loading_imports_neither_torch_nor_plug_ins() -> None:
    """A policy whose backends are built in asks no registry."""
    code = (
        "import sys, sm70_moe.policy as p; p.shipped_policies(); "
        "print([m for m in ('torch', 'numpy', 'sm70_moe.kernels.registry') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


def test_a_folder_stands_beside_the_shipped_policies(tmp_path: Path) -> None:
    """A folder's policies join the shipped ones; one of a shipped name takes its place."""
    own = (policies_folder() / "generic-awq.toml").read_text()
    (tmp_path / "a.toml").write_text(own.replace('name     = "generic-awq"', 'name     = "mine"'))
    (tmp_path / "b.toml").write_text(re.sub(r"revision = \d+", "revision = 7", own))
    found = {policy.name: policy for policy in load_policies(str(tmp_path))}
    assert found.keys() == {"mine", *(policy.name for policy in shipped_policies())}
    assert found["generic-awq"].revision == 7
    (tmp_path / "c.toml").write_text((tmp_path / "a.toml").read_text())
    with pytest.raises(PolicyError, match=r"c\.toml: name: found 'mine'"):
        load_policies(str(tmp_path))


def test_a_folder_without_policies_is_an_error(tmp_path: Path) -> None:
    """An empty folder is a mistake, not "no policies"."""
    with pytest.raises(PolicyError, match="has no policy"):
        load_policies(str(tmp_path))


@pytest.mark.parametrize(
    ("mark", "name"), [(b"\xef\xbb\xbf", "UTF-8"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")]
)
def test_a_byte_order_mark_is_named(tmp_path: Path, mark: bytes, name: str) -> None:
    """What an editor put in front of the text is said, instead of an invalid statement."""
    path = tmp_path / "own.toml"
    path.write_bytes(mark + (policies_folder() / "generic-awq.toml").read_bytes())
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert caught.value.problems == (
        f"{path}:1: found a byte order mark (BOM) of {name}; accepted is UTF-8 text without one",
    )


def test_a_byte_order_mark_of_a_decoded_text_is_named() -> None:
    """A host may hand over text that it has read itself."""
    text = "\ufeff" + (policies_folder() / "generic-awq.toml").read_text(encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "FILE")
    assert caught.value.problems == ("FILE:1: found a byte order mark (BOM), accepted text without one",)
