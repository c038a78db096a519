"""Settings of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import structlog
from hypothesis import settings

# no deadline: a busy machine is no failure, and no test of this suite measures time
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu",
        choices=("auto", "off", "require"),
        default="auto",
        help="tests marked gpu: run them where there is a GPU (auto), skip them (off), fail without one (require)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped, and reported as skipped, without one")


@pytest.fixture(autouse=True)
def _fresh_structlog() -> Iterator[None]:
    """A command that a test ran in this process configures structlog, as hosts do; the next test starts anew."""
    yield
    structlog.reset_defaults()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that was not run for want of a GPU is a skip, never a pass."""
    if item.get_closest_marker("gpu") is None:
        return
    choice = item.config.getoption("--gpu")
    if choice == "off":
        pytest.skip("--gpu=off")
    if not have_gpu() and choice == "auto":
        pytest.skip("no GPU on this machine")
    if not have_gpu():
        pytest.fail("--gpu=require, and there is no GPU on this machine", pytrace=False)


@cache
def have_gpu() -> bool:
    """Does the driver's management library see a GPU? CUDA is not started."""
    from sm70_moe.machine import nvml_devices

    return bool(nvml_devices())
