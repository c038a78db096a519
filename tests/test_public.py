"""The public surface: names, lazy loading, an import without effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sm70_moe
from sm70_moe import errors


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


def test_all_names_are_sorted_and_load() -> None:
    """`__all__` is sorted and complete, and every name in it is there."""
    assert sm70_moe.__all__ == sorted(sm70_moe.__all__)
    assert set(sm70_moe.__all__) == set(sm70_moe._HOMES)
    for name in sm70_moe.__all__:
        assert getattr(sm70_moe, name).__name__ == name
    assert set(sm70_moe.__all__) <= set(dir(sm70_moe))


def test_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails like any other attribute."""
    with pytest.raises(AttributeError, match="AdmissionServise"):
        sm70_moe.AdmissionServise  # noqa: B018  # the access is the test


def test_every_public_error_is_one_of_ours() -> None:
    """One base class catches them all, and the tree in the docstring names each."""
    for name in sm70_moe.__all__:
        if name.endswith(("Error", "Refused", "Disagreement")):
            assert issubclass(getattr(sm70_moe, name), sm70_moe.Sm70MoeError)
            assert name in (errors.__doc__ or "")


def test_import_has_no_effects(tmp_path: Path) -> None:
    """No torch, no environment, no .env of the working directory, no logging configuration."""
    (tmp_path / ".env").write_text("SM70_MOE_QPN_M1=nonsense\n")
    code = (
        f"import os, sys, logging; os.chdir({str(tmp_path)!r})\n"
        "class Watched(dict):\n"
        "    def __getitem__(self, key): raise AssertionError(key)\n"
        "    get = __contains__ = __iter__ = __getitem__\n"
        "before = dict(os.environ); os.environ = Watched()\n"
        "import sm70_moe\n"
        "assert 'torch' not in sys.modules and 'structlog' not in sys.modules\n"
        "assert logging.getLogger().handlers == []\n"
    )
    done = run(code, SM70_MOE_QPN_M1="true", PATH="/usr/bin")
    assert done.returncode == 0, done.stderr


def test_deciding_needs_no_torch() -> None:
    """Policies, settings, admission, plans, journal and explanations work where torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import sm70_moe as sm\n"
        "from sm70_moe.testing import contract_facts, fake_machine\n"
        "policy = sm.load_policy('qwen3.8-flash-next-awq-tp4')\n"
        "service = sm.AdmissionService(sm.Settings.from_env({}), policy=policy, machine=fake_machine())\n"
        "assert service.admit(contract_facts(policy)).supported\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
