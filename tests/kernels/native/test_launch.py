"""Launching with a driver that only looks: versions, configurations, and every byte of the arguments."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.build.versions import Scope, versions
from sm70_moe.kernels.native.driver import Config
from sm70_moe.kernels.native.launch import Launcher, Step, ordinal
from sm70_moe.kernels.native.refusal import LaunchRefused
from sm70_moe.testing.driver import FakeDriver, Launched

MANIFEST = """
geometry = ["hidden"]
most = { top_k = 16 }

[axes.metadata]
macro  = "MOE_METADATA"
values = { "4-byte" = 4, "3-byte" = 3 }

[kernels.first]
arguments = ["x", "tokens:i32", "scale:f32", "out", "bytes:i64"]
threads   = 160
shared    = 1024

[kernels.second]
arguments = ["out", "tokens:i32"]
threads   = 64
"""

KINDS = {"first": ("ptr", "i32", "f32", "ptr", "i64"), "second": ("ptr", "i32"), "idle": ()}
GEOMETRY = Geometry(hidden=2560, intermediate=160, experts=512, top_k=10, group=32)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Two kernels for two architectures, on a fake device."""
    (tmp_path / "two.toml").write_text(MANIFEST)
    (tmp_path / "idle.toml").write_text("[kernels.idle]\nthreads = 32")
    manifests = load_manifests(tmp_path)
    scope = Scope(("sm_70", "sm_90"), (GEOMETRY,))
    contents = {version: version.name.encode() for version in versions(manifests.values(), scope)}
    cubins = Cubins.write(tmp_path, "id", "compiler", scope, contents)
    return Launcher(cubins, manifests, 1, FakeDriver(KINDS))


def seen(launcher: Launcher) -> list[Launched]:
    assert isinstance(launcher.driver, FakeDriver)
    return launcher.driver.launched


FIRST = Step("two", "first", grid=(40, 10))
SECOND = Step("two", "second", grid=(80,), dependent=True)


def test_arguments_in_the_kernels_order(launcher: Launcher) -> None:
    """Varying ones come from the call and the others from the program, whatever their order."""
    values = {"scale": 0.5, "bytes": 2**40, "tokens": 3}
    program = launcher.program([FIRST, SECOND], varying=("out", "x"), values=values)
    program(7, 2**47 + 16, 4096)
    first, second = seen(launcher)
    assert (first.kernel, first.stream, first.arguments) == ("first", 7, (4096, 3, 0.5, 2**47 + 16, 2**40))
    assert (second.kernel, second.stream, second.arguments) == ("second", 7, (2**47 + 16, 3))
    program(0, 16, 32)
    assert seen(launcher)[2].arguments == (32, 3, 0.5, 16, 2**40)
    assert seen(launcher)[2].stream == 0


def test_configurations(launcher: Launcher) -> None:
    """Grid from the step, threads and shared memory from the manifest unless the step has its own."""
    values = {"scale": 1, "bytes": 1, "tokens": 1, "x": 0}
    steps = [FIRST, SECOND, replace(FIRST, threads=96, shared=0, cooperative=True)]
    launcher.program(steps, varying=("out",), values=values)(1, 2)
    assert [launched.config for launched in seen(launcher)] == [
        Config((40, 10, 1), 160, 1024, False, False),
        Config((80, 1, 1), 64, 0, True, False),
        Config((40, 10, 1), 96, 0, False, True),
    ]


def test_a_steps_own_values_go_first(launcher: Launcher) -> None:
    """Two launches of one kernel may differ in one number; a number may take a varying name's place."""
    steps = [replace(SECOND, values={"tokens": 1}), replace(SECOND, values={"tokens": 2, "out": 64}), SECOND]
    launcher.program(steps, varying=("out",), values={"tokens": 9})(1, 128)
    assert [launched.arguments for launched in seen(launcher)] == [(128, 1), (64, 2), (128, 9)]


def test_varying_numbers_of_every_kind(launcher: Launcher) -> None:
    """Not only addresses may change from call to call."""
    names = ("bytes", "scale", "tokens", "x", "out", "nobody")
    program = launcher.program([FIRST], varying=names)
    program(1, -(2**62), 0.25, -5, 8, 2**63, 0)
    assert seen(launcher)[0].arguments == (8, -5, 0.25, 2**63, -(2**62))


def test_kernels_without_arguments(launcher: Launcher) -> None:
    """An empty kernel is launched like any other."""
    launcher.program([Step("idle", "idle", grid=(1,))])(1)
    assert seen(launcher)[0].arguments == ()


@pytest.mark.parametrize(
    ("sizes", "axes", "image"),
    [
        ({"hidden": 2560}, {}, b"two.sm_70.hidden2560.4-byte"),
        ({"hidden": 2560}, {"metadata": "3-byte"}, b"two.sm_70.hidden2560.3-byte"),
        ({"hidden": 2048}, {}, b"two.sm_70.runtime.4-byte"),
        ({}, {}, b"two.sm_70.runtime.4-byte"),
    ],
)
def test_versions(launcher: Launcher, sizes: dict, axes: dict, image: bytes) -> None:
    """By sizes and axes, for the device's own architecture; an axis that is left out has its first value."""
    values = dict.fromkeys(("out", "tokens"), 0)
    launcher.program([replace(SECOND, axes=axes)], values=values, sizes=sizes)
    assert isinstance(launcher.driver, FakeDriver)
    assert launcher.driver.loaded == [(1, image, "second")]


def test_each_kernel_is_loaded_once(launcher: Launcher) -> None:
    """However many programs use it, and from however many threads."""
    values = dict.fromkeys(("out", "tokens"), 0)
    threads = [threading.Thread(target=lambda: launcher.program([SECOND], values=values)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(launcher.driver, FakeDriver)
    assert len(launcher.driver.loaded) == 1


@pytest.mark.parametrize(
    ("step", "values", "sizes", "named"),
    [
        (SECOND, {"out": 1}, {}, "tokens"),
        (Step("two", "third", grid=(1,)), {}, {}, "third"),
        (Step("three", "first", grid=(1,)), {}, {}, "three"),
        (replace(SECOND, grid=(0,)), {"out": 1, "tokens": 1}, {}, "grid"),
        (replace(SECOND, grid=(1, 65_536)), {"out": 1, "tokens": 1}, {}, "65535"),
        (replace(SECOND, grid=(1, 1, 1, 1)), {"out": 1, "tokens": 1}, {}, "grid"),
        (SECOND, {"out": 1, "tokens": 2**31}, {}, "tokens"),
        (SECOND, {"out": -1, "tokens": 1}, {}, "out"),
        (SECOND, {"out": 1, "tokens": 0.5}, {}, "tokens"),
        (SECOND, {"out": 1, "tokens": 1}, {"top_k": 17}, "top_k 17"),
        (replace(SECOND, axes={"metadata": "5-byte"}), {"out": 1, "tokens": 1}, {}, "5-byte"),
    ],
)
def test_refused_before_any_launch(launcher: Launcher, step: Step, values: dict, sizes: dict, named: str) -> None:
    """What is missing, unknown, too large or no number is named when the program is made."""
    with pytest.raises(BackendError, match=named):
        launcher.program([step], values=values, sizes=sizes)


def test_one_name_has_one_kind(launcher: Launcher, tmp_path: Path) -> None:
    """A varying argument that is an address here and a number there is refused."""
    steps = [SECOND, Step("two", "first", grid=(1,), values={"tokens": 1, "scale": 1, "bytes": 1, "out": 1, "x": 1})]
    text = MANIFEST.replace('["out", "tokens:i32"]', '["tokens", "out"]')
    (tmp_path / "two.toml").write_text(text)
    other = Launcher(launcher.images, load_manifests(tmp_path), 1, launcher.driver)
    with pytest.raises(BackendError, match="tokens"):
        other.program([SECOND, replace(steps[1], values={"scale": 1, "bytes": 1, "x": 1})], varying=("tokens", "out"))


def test_the_drivers_words_reach_the_caller(launcher: Launcher) -> None:
    """A refused launch is an error of its own kind with the driver's text."""
    assert isinstance(launcher.driver, FakeDriver)
    launcher.driver.refuses = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch"
    program = launcher.program([SECOND], values={"out": 1, "tokens": 1})
    with pytest.raises(LaunchRefused, match="too many resources"):
        program(1)


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3), (2, 2)])
def test_device_numbers(device: str | int, number: int) -> None:
    """As torch writes them."""
    assert ordinal(device) == number


@pytest.mark.parametrize("device", ["cpu", "cuda:", "cuda:x", "cuda:-1", "xpu:0", ""])
def test_other_devices(device: str) -> None:
    """Anything else is refused by name."""
    with pytest.raises(BackendError, match="accepted is cuda"):
        ordinal(device)


def test_no_build_to_open(tmp_path: Path) -> None:
    """The folder is named."""
    with pytest.raises(BackendError, match="no native build"):
        Launcher.open("cuda:0", tmp_path, FakeDriver({}))
