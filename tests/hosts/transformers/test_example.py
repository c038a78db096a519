"""The example and the document are run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]


def test_the_example_runs(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells how many layers are ours and prints prompt and 16 new tokens."""
    pytest.importorskip("accelerate", reason="transformers wants it for a device_map")
    example = ROOT / "examples" / "transformers_generate.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(make().packed)])
    runpy.run_path(str(example), run_name="__main__")
    summary, tokens = capsys.readouterr().out.strip().splitlines()[-2:]
    assert summary.startswith("supported 2/2")
    assert len(tokens.split(",")) == 20


def test_the_documents_code_runs(make: Callable[..., Any]) -> None:
    """The Python blocks of docs/transformers.md, one after the other."""
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"folder": str(make().packed)}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)
    assert names["tokens"].shape[0] == 1
