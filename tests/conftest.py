"""Settings of the whole suite, and small checkpoints, whole or broken on purpose."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import structlog
from hypothesis import settings
from safetensors.numpy import load_file, save_file

from sm70_moe.checkpoint.sample import write_sample

Arrays = dict[str, np.ndarray[Any, Any]]

LAYER = "model.layers.0.mlp.experts"
SIZES = {"hidden": 64, "intermediate": 96, "experts": 3, "top_k": 2, "layers": 1, "group": 32, "seed": 7}


# no deadline: a busy machine is no failure, and no test of this suite measures time
settings.register_profile("suite", deadline=None, print_blob=True)
settings.register_profile("quick", deadline=None, print_blob=True, max_examples=10)  # mutation runs
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu",
        choices=("auto", "off", "require"),
        default="auto",
        help="tests marked gpu: run them where there is a GPU (auto), skip them (off), fail without one (require)",
    )
    parser.addoption("--fuzz", type=float, default=1.0, help="seconds of processor for each kind of tests/fuzz")
    parser.addoption("--fuzz-seed", type=int, default=14, help="where the inputs of tests/fuzz begin")
    parser.addoption("--kills", type=int, default=3, help="how often tests/reliability kill, or swap, what they try")
    parser.addoption(
        "--native",
        choices=("auto", "require"),
        default="auto",
        help="tests of the installed native build or its compiler: skip them without (auto), fail (require)",
    )


OWN = ("SM70_MOE_", "VLLM_SM70_")
TERMINAL = ("COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def pytest_configure(config: pytest.Config) -> None:
    """Settings and terminal of whoever runs the tests do not count: each test has its own, or none."""
    for name in [name for name in os.environ if name.upper().startswith(OWN) or name in TERMINAL]:
        del os.environ[name]
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


@pytest.fixture(scope="session")
def lacking(request: pytest.FixtureRequest) -> Callable[[str], NoReturn]:
    """What a test calls that cannot run for want of a native build: never a pass, and with `require` a failure."""
    return pytest.fail if request.config.getoption("--native") == "require" else pytest.skip


@cache
def have_gpu() -> bool:
    """Does the driver's management library see a GPU? CUDA is not started."""
    from sm70_moe.machine.devices import nvml_devices

    return bool(nvml_devices())


@pytest.fixture
def tiny() -> Path:
    """A checkpoint that AutoAWQ wrote: 2 layers, 16 experts, hidden 256, intermediate 128, group 32."""
    return Path(__file__).parent / "data" / "tiny-qwen3-moe-awq"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A complete folder of one file: hidden 64, intermediate 96, 3 experts, group 32."""
    write_sample(tmp_path / "good", **SIZES)
    return tmp_path / "good"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files with an index."""
    write_sample(tmp_path / "sharded", **SIZES, shard_bytes=8_000)
    return tmp_path / "sharded"


@pytest.fixture
def alter(good: Path) -> Callable[..., Path]:
    """Changes the tensors, top-level config keys or quantization_config keys of the good folder."""

    def change(
        edit: Callable[[Arrays], Any] | None = None,
        config: dict[str, Any] | None = None,
        quantization: dict[str, Any] | None = None,
    ) -> Path:
        arrays = load_file(good / "model.safetensors")
        if edit is not None:
            edit(arrays)
        save_file(arrays, good / "model.safetensors")
        content = json.loads((good / "config.json").read_text())
        content.update(config or {})
        content["quantization_config"].update(quantization or {})
        (good / "config.json").write_text(json.dumps(content))
        return good

    return change
