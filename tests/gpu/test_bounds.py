"""Every native route, kind of metadata, group, bank order and number of tokens against the FP64 reference."""

from __future__ import annotations

from itertools import product

import pytest

from sm70_moe.kernels.build.geometry import shipped_geometries

pytestmark = pytest.mark.gpu

METADATA = ("4-byte", "3-byte", "2.5-byte")

SHIPPED = [
    {"hidden": g.hidden, "intermediate": g.intermediate, "top_k": g.top_k, "group": g.group}
    for g in shipped_geometries()
]
ODD = [
    {"hidden": 608, "intermediate": 96, "top_k": 3, "group": 32},
    {"hidden": 704, "intermediate": 192, "top_k": 5, "group": 64},
    {"hidden": 896, "intermediate": 128, "top_k": 6, "group": 128},
]
"""Sizes that no policy has, each with another group."""

CASES = [
    *(("specialised", "octet32", metadata, sizes) for sizes, metadata in product(SHIPPED, METADATA)),
    *(
        ("runtime", order, metadata, sizes)
        for sizes, order, metadata in product(ODD, ("octet32", "tile32x8"), METADATA)
    ),
    *(("runtime", "tile32x8", metadata, SHIPPED[-1]) for metadata in METADATA),
]


def name_of(case) -> str:
    version, order, metadata, sizes = case
    return "-".join([version, order, metadata, *(f"{size}" for size in sizes.values())])


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest, layers):
    """A version of the kernels by its label, and a layer that runs it."""
    version, order, metadata, sizes = request.param
    return version, layers.make(order=order, metadata=metadata, **sizes)


@pytest.mark.parametrize("kind", ["call", "mixed"])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_inside_the_bounds(case, routes_of, note, tokens: int, kind: str) -> None:
    """W13, each slot of W2 and the sum keep their bounds; calls repeat; the sum has the bits of its slots."""
    version, subject = case
    call = getattr(subject, kind)(tokens, seed=tokens)
    with routes_of(subject.layer) as taken:
        result = subject.judge(call)
    sizes = subject.sizes
    geometry = f"H {sizes.hidden} I {sizes.intermediate} k {sizes.top_k}"
    note(f"{taken[0]}, {version}, {subject.layer.banks.layout.tag}, {geometry}", result)
    assert set(taken) == {"qpn_m1" if tokens == 1 else "grouped_decode"}
    assert result.ok, result
    assert result.out_exact


def test_the_version_that_runs(case) -> None:
    """Shipped geometries have their own version, whatever the number of experts; others take the runtime version."""
    version, subject = case
    banks, top_k = subject.layer.banks, subject.sizes.top_k
    sizes = {"hidden": banks.shape.hidden, "intermediate": banks.shape.intermediate, "experts": banks.shape.experts}
    axes = {"metadata": banks.layout.metadata.value, "order": banks.layout.order, "step": "own"}
    launcher = subject.layer.plan.admission.machine.backends["grouped"].launcher(str(subject.device))
    for source in ("decode_w13", "decode_w2"):
        given = {**sizes, "top_k": top_k, "group": banks.layout.group}
        image = launcher.images.find(source, launcher.architecture, given, axes)
        assert version in image.version.labels
