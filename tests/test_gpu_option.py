"""`--gpu`: what becomes of a test that needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = (Path(__file__).parent / "conftest.py").read_text(encoding="utf-8")
TESTS = """
import pytest

@pytest.mark.gpu
def test_device():
    pass

def test_plain():
    pass
"""


@pytest.mark.parametrize(
    ("gpu", "choice", "outcomes"),
    [
        (False, "auto", {"passed": 1, "skipped": 1}),
        (False, "off", {"passed": 1, "skipped": 1}),
        (False, "require", {"passed": 1, "errors": 1}),
        (True, "auto", {"passed": 2}),
        (True, "off", {"passed": 1, "skipped": 1}),
        (True, "require", {"passed": 2}),
    ],
)
def test_choices(pytester: pytest.Pytester, gpu: bool, choice: str, outcomes: dict[str, int]) -> None:
    """Without a GPU a skip is told as a skip, and `require` fails; tests that need none always run."""
    pytester.makeconftest(f"{CONFTEST}\n\ndef have_gpu() -> bool:\n    return {gpu}\n")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("--gpu", choice, "-p", "no:cacheprovider")
    result.assert_outcomes(**outcomes)


def test_usual_choice(pytester: pytest.Pytester) -> None:
    """Without the option it is auto; another value is refused."""
    pytester.makeconftest(f"{CONFTEST}\n\ndef have_gpu() -> bool:\n    return False\n")
    pytester.makepyfile(TESTS)
    pytester.runpytest("-p", "no:cacheprovider", "-rs").stdout.fnmatch_lines(["SKIPPED*no GPU on this machine"])
    assert pytester.runpytest("--gpu", "maybe").ret == pytest.ExitCode.USAGE_ERROR
