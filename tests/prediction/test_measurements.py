"""Reading a result: what no benchmark writes is refused, and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import SettingsError
from sm70_moe.prediction.measurements import LEAST, MOST, load_run, run_of

ROW = {
    "arm": "ours",
    "launch": "plain",
    "part": "both",
    "metadata": "4-byte",
    "tokens": 4,
    "routing": "uniform",
    "distinct": 38.8,
    "microseconds": 18.0,
}
NAN, INFINITY = float("nan"), float("inf")


def record(**row: object) -> dict:
    return {"schema": 1, "gpu": {"name": "NVIDIA H200"}, "build": "b", "policy": "p", "rows": [ROW | row]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tokens", value) for value in (INFINITY, NAN, 4.5, "4", True, None)),
        *(("microseconds", value) for value in (NAN, INFINITY, -1.0, 0, 1e-9, 1e9, 10**400, "18", None)),
        *(("distinct", value) for value in (0, NAN, INFINITY, -4, 1e308, 10**400)),
        *(("metadata", value) for value in ("9-byte", "", 4)),
        *(("part", value) for value in ("w7", None)),
        *(("arm", value) for value in (None, ["ours"])),
    ],
)
def test_values_of_no_benchmark(key: str, value: object, tmp_path: Path) -> None:
    """The file and the field are named."""
    (tmp_path / "bad.json").write_text(json.dumps(record(**{key: value})))
    with pytest.raises(SettingsError, match=rf"(?s)bad\.json.*{key}"):
        load_run(tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "null", "[1]", '"text"', "\x00"])
def test_files_of_no_benchmark(text: str, tmp_path: Path) -> None:
    """Deep, long or of another kind: the file is named."""
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(SettingsError, match=r"bad\.json"):
        load_run(tmp_path / "bad.json")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Not UTF-8."""
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"bad\.json"):
        load_run(tmp_path / "bad.json")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner), max_leaves=4
)


@given(st.sampled_from(["schema", "gpu", "build", "policy", "rows", "geometry", "policy_digest", *ROW]), ANYTHING)
def test_any_value_in_any_place(key: str, value: object) -> None:
    """A run of sane numbers, or a ValueError: nothing else."""
    changed = record(**{key: value}) if key in ROW else record() | {key: value}
    try:
        run = run_of(changed, "test")
    except ValueError:
        return
    assert all(LEAST <= row.microseconds <= MOST and row.distinct >= 1 and row.tokens >= 1 for row in run.rows)


def test_what_the_file_says_of_itself() -> None:
    """Build, policy and sizes; a source of its own makes it a documented one."""
    sizes = {"hidden": 2560, "intermediate": 160, "experts": 512, "top_k": 10, "group": 32}
    run = run_of(record() | {"policy_digest": "d", "geometry": sizes}, "x.json")
    assert (run.build, run.policy, run.digest, run.source, run.documented) == ("b", "p", "d", "x.json", False)
    assert run.geometry is not None
    assert run.geometry.record() == sizes
    written = run_of(record() | {"build": None, "source": "by hand"}, "x.json")
    assert (written.build, written.geometry, written.source, written.documented) == ("", None, "by hand", True)
