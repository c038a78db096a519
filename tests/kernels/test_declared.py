"""Declarations stand between policies and CUDA sources: what they say is what the manifests hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels import registry
from sm70_moe.kernels.build import SOURCES as FOLDER
from sm70_moe.kernels.build.manifest import load_manifest
from sm70_moe.kernels.declared import BUILT_IN, FUSED, SOURCES, TUNED, capability, declared
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.steps import OPTIONS, STEPS, Route
from sm70_moe.layout import ORDERS, BankShape, Metadata

PAIRS = [(name, source) for name, sources in SOURCES.items() for source in sources]


def test_native_rows_are_the_declared_ones() -> None:
    """A row of steps for each declared native backend or option, with its sources and capability; no other."""
    assert set(STEPS) == set(SOURCES) == {"decode", "qpn", "grouped", "indexed", FUSED}
    assert {option for options in OPTIONS.values() for option in options} == {FUSED, TUNED}
    for name, route in STEPS.items():
        assert route.sources == SOURCES[name]
        assert route.runs == declared(name)
    assert set(registry.load()) >= BUILT_IN
    assert all(capability(name) for name in BUILT_IN)
    with pytest.raises(BackendError, match="nothing is declared"):
        Route.of("indexd", lambda case: ())


@pytest.mark.parametrize(("name", "source"), PAIRS)
def test_sources_exist_with_their_manifest(name: str, source: str) -> None:
    """A .cu and a .toml for each."""
    assert (Path(FOLDER) / f"{source}.cu").is_file()
    assert load_manifest(FOLDER / f"{source}.toml").kernels


@pytest.mark.parametrize(("name", "source"), PAIRS)
def test_axes_of_the_manifests_are_what_is_declared(name: str, source: str) -> None:
    """Kinds of metadata and orders: exactly those that the declaration reads, since each is a version."""
    ability, manifest = declared(name), load_manifest(FOLDER / f"{source}.toml")
    assert ability is not None
    axes = {axis.name: set(axis.values) for axis in manifest.axes}
    kinds = {kind.value for kind in ability.reads.metadata}
    if source.startswith("batch_"):  # compact kinds are told apart while the kernels run, if they matter at all
        kinds = {"4-byte", "compact"} if source == "batch_product" else set()
    assert axes.get("metadata", set()) == kinds
    if "order" in axes:
        assert axes["order"] == set(ability.reads.orders)
    else:
        assert ability.reads.orders == {"octet32"} or (source != "batch_product" and source.startswith("batch_"))
    assert ability.reads.orders <= set(ORDERS)


@pytest.mark.parametrize("name", SOURCES)
def test_sizes_are_those_of_all_manifests(name: str) -> None:
    """A size that one of a backend's sources does not take, the backend does not take."""
    ability = capability(name)
    assert ability is not None
    for source in SOURCES[name]:
        manifest = load_manifest(FOLDER / f"{source}.toml")
        for size, unit in manifest.divides.items():
            assert ability.multiples[size] % unit == 0
        for size, most in manifest.most.items():
            assert ability.most[size] <= most


@pytest.mark.parametrize("name", SOURCES)
def test_every_declared_call_has_steps_that_the_manifests_hold(name: str) -> None:
    """Each token count on each layout launches kernels that exist, with values of their axes that exist."""
    route = STEPS[name]
    for layout in route.layouts:
        for tokens in (*range(1, 9), *route.planned(BankShape(8, 256, 64), 4), 5000):
            if tokens not in route.runs.tokens:
                continue
            case = Case(BankShape(8, 256, 64), layout, 4, tokens, "sm_70", dependent=False)
            for step in route.steps(case):
                manifest = load_manifest(FOLDER / f"{step.source}.toml")
                assert step.source in route.sources
                assert step.kernel in manifest.kernels
                values = {axis.name: axis.values for axis in manifest.axes}
                assert all(value in values[axis] for axis, value in step.axes.items())


# M -> (W13, its blocks, W2, its blocks) at the first contract's sizes: hidden 2560, 160 a rank, top-10
TABLE = {
    1: ("w13_1", (40, 10), "w2_1", (320, 1)),
    2: ("w13_2", (40, 20), "w2_1", (320, 2)),
    3: ("w13_8", (40, 30), "w2_4", (320, 1)),
    4: ("w13_8", (40, 40), "w2_4", (320, 1)),
    5: ("w13_8", (40, 50), "w2_8", (320, 2)),
    6: ("w13_8", (40, 60), "w2_8", (320, 2)),
    7: ("w13_8", (40, 70), "w2_8", (320, 2)),
    8: ("w13_8", (40, 80), "w2_8", (320, 2)),
}


@pytest.mark.parametrize("tokens", TABLE)
def test_steps_of_the_shipped_decode_routes(tokens: int) -> None:
    """Kernels and grids for 1 to 8 tokens, written out."""
    layout = STEPS["grouped"].layouts[0]
    case = Case(BankShape(512, 2560, 160), layout, 10, tokens, "sm_70", dependent=False)
    w13, w2 = STEPS["qpn" if tokens == 1 else "grouped"].steps(case)
    assert (w13.kernel, w13.grid, w2.kernel, w2.grid) == TABLE[tokens]


def test_a_native_backend_says_what_is_declared() -> None:
    """On GPUs its declaration with sizes, on a CPU nothing; the option has its own."""
    for name in ("qpn", "grouped", "indexed"):
        assert NativeBackend(name).can("sm_70") == capability(name)
        assert NativeBackend(name).can("cpu") is None
    assert NativeBackend("qpn", fused=True).can("sm_90") == capability(FUSED)
    found = capability(FUSED)
    assert found is not None
    assert found.reads.metadata == {Metadata.FOUR_BYTE, Metadata.THREE_BYTE}
