"""A backend launches what was made for a layer's sizes, and the build's kernels for any others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from sm70_moe.kernels.build import SOURCES, build_id, nvrtc
from sm70_moe.kernels.build import specialiser as module
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.kernels.build.images import Cubins
from sm70_moe.kernels.build.manifest import load_manifests
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.kernels.build.versions import Scope, versions
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.driver import Driver
from sm70_moe.kernels.native.specialised import Layer, jobs
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.layout import BankLayout, BankShape, Metadata
from sm70_moe.machine.probe import configured
from sm70_moe.testing.driver import FakeDriver

MANIFESTS = load_manifests(SOURCES)
KINDS = {k.name: [a.kind for a in k.arguments] for m in MANIFESTS.values() for k in m.kernels.values()}


def layer(intermediate: int = 384) -> Layer:
    layout = BankLayout("octet32", Metadata.FOUR_BYTE, 128, True, True)
    return Layer(BankShape(128, 2048, intermediate), layout, 8, "sm_70")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A build with kernels for any sizes only, as the sources would give it."""
    place, scope = tmp_path / "build", Scope(("sm_70",), ())
    place.mkdir()
    contents = dict.fromkeys(versions(MANIFESTS.values(), scope), b"any sizes")
    Cubins.write(place, build_id(scope), "compiler", scope, contents)
    return place


def loaded(backend: NativeBackend, of: Layer) -> set[tuple[bytes, str]]:
    """What the driver is given for every call of a layer."""
    launcher, route = backend.launcher("cuda:0"), STEPS[backend.name]
    assert isinstance(launcher.driver, FakeDriver)
    launcher.driver.loaded.clear()
    for tokens in range(route.first, route.last + 1):
        case = of.case(tokens, False)
        names = {a.name for s in route.steps(case) for a in MANIFESTS[s.source].kernels[s.kernel].arguments}
        launcher.program(route.steps(case), values=dict.fromkeys(names, 0), sizes=case.geometry.record())
    return {(image, kernel) for _, image, kernel in launcher.driver.loaded}


@pytest.mark.parametrize("name", ["qpn", "grouped"])
def test_what_is_launched(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Everything that `jobs` names, and nothing else: no call of the layer takes kernels for any sizes."""
    monkeypatch.setattr(module, "judged", lambda *_: ())
    made = Specialiser(None, compiler=lambda wanted, _: {j.key: j.version.source.encode() for j in wanted})

    def driver() -> Driver:
        return FakeDriver(KINDS)

    backend = configured(NativeBackend(name, driver=driver), folder, True, made)
    assert isinstance(backend, NativeBackend)
    assert {image for image, _ in loaded(backend, layer(192))} == {b"any sizes"}
    made.make(jobs(made, name, layer()), lambda file, text: None)
    found = loaded(backend, layer())
    assert {image for image, _ in found} == {source.encode() for source in STEPS[name].sources}
    assert all(kernel in MANIFESTS[image.decode()].kernels for image, kernel in found)


def test_options_keep_it(folder: Path) -> None:
    """The backend of a layer with options compiles with the same."""
    made = Specialiser(None)
    backend = configured(NativeBackend("qpn"), folder, True, made)
    assert isinstance(backend, NativeBackend)
    assert backend.with_options({"fused_decode"}).specialiser is made


def test_bfloat16_is_compiled_on_the_spot_alone() -> None:
    """No build has such versions; from sm_80 on a layer's own are compiled, each source once for all its kernels."""
    scope = Scope(("sm_70", "sm_80"), (Geometry(2048, 384, 128, 8, 128),))
    assert not [version for version in versions(MANIFESTS.values(), scope) if "bfloat16" in version.source]
    made, of = Specialiser(None), replace(layer(), dtype="bfloat16")
    assert jobs(made, "decode", of) == ()  # sm_70
    found = jobs(made, "decode", replace(of, architecture="sm_80"))
    assert sorted(job.version.source for job in found) == ["decode_w13_bfloat16", "decode_w2_bfloat16"]
    assert {kernel for job in found for kernel in MANIFESTS[job.version.source].kernels} == {
        step.kernel for tokens in range(1, 9) for step in STEPS["decode"].steps(of.case(tokens, False))
    } | {"w13_many_1", "w13_many_8", "w2_many"}


def test_the_compiled_kernels_keep_their_budgets(compiler: None) -> None:
    """NVRTC, for a small layer: what the gate refuses would never run."""
    made = Specialiser(None)
    layout = BankLayout("octet32", Metadata.THREE_BYTE, 32, True, True)
    small = Layer(BankShape(8, 256, 64), layout, 2, "sm_80", "bfloat16")
    wanted = jobs(made, "decode", small)
    found = made.make(wanted, lambda file, text: None)
    assert len(found.compiled) == 2


@pytest.fixture
def compiler(lacking: Callable[[str], NoReturn]) -> None:
    if why := nvrtc.missing():
        lacking(why)
