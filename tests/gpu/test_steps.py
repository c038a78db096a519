"""Volta's tensor-core step, which other architectures emulate: only in test builds, never what a route takes there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.bound import Bound
from sm70_moe.kernels.native.launch import Launcher, Step
from sm70_moe.kernels.native.steps import STEPS, Case, decode

pytestmark = pytest.mark.gpu

FIRST = {"hidden": 2560, "intermediate": 160, "top_k": 10, "group": 32}
ODD = {"hidden": 896, "intermediate": 128, "top_k": 6, "group": 128}
CASES = [
    *(("octet32", metadata, FIRST) for metadata in ("4-byte", "3-byte", "2.5-byte")),
    *((order, metadata, ODD) for order in ("octet32", "tile32x8") for metadata in ("4-byte", "3-byte", "2.5-byte")),
]


def volta(case: Case) -> tuple[Step, ...]:
    return tuple(replace(step, axes={**step.axes, "step": "volta"}) for step in decode(case))


@pytest.fixture(scope="module")
def launcher(layers) -> Launcher:
    """The kernels, if Volta's step is among them."""
    found = layers.machine().backends["grouped"].launcher("cuda:0")
    there = {
        i.version.architecture
        for i in getattr(found.images, "installed", found.images).images
        if ("step", "volta") in i.version.axes
    }
    if found.architecture not in there:
        pytest.skip(f"the build has no version step=volta for {found.architecture}: it is no test build (--tests)")
    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]['hidden']}")
def subject(request: pytest.FixtureRequest, layers, launcher: Launcher):
    """A layer whose calls take Volta's step: bound as the routes are, with another value of the axis."""
    order, metadata, sizes = request.param
    made = layers.make(order=order, metadata=metadata, **sizes)
    route = replace(STEPS["decode"], steps=volta)
    bound = Bound("volta", launcher, route, made.layer.banks, dependent=False)

    def run(x, ids, weights, out, intermediate=None) -> None:
        bound(made.layer.banks, Call(x, ids, weights, out, intermediate), None)

    return replace(made, run=run)


@pytest.mark.parametrize("kind", ["call", "mixed"])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_inside_the_bounds(subject, note, tokens: int, kind: str) -> None:
    """W13, each slot of W2 and the sum."""
    result = subject.judge(getattr(subject, kind)(tokens, seed=tokens))
    note(f"Volta's step, {subject.layer.banks.layout.tag}, H {subject.sizes.hidden}", result)
    assert result.ok, result
    assert result.out_exact


@pytest.mark.parametrize("kind", ["call", "mixed"])
def test_a_token_has_the_same_bits_alone_and_in_company(subject, kind: str) -> None:
    """Rows of calls of 2 to 8 tokens are those of single calls."""
    whole = getattr(subject, kind)(8, seed=80)
    rows = [Inputs(whole.x[i : i + 1], whole.ids[i : i + 1], whole.weights[i : i + 1]) for i in range(8)]
    alone = torch.cat([subject.answer(row) for row in rows])
    for tokens in range(2, 9):
        part = Inputs(whole.x[:tokens], whole.ids[:tokens], whole.weights[:tokens])
        assert same_bits(subject.answer(part), alone[:tokens])


def test_no_valid_id_gives_exact_zeros(subject) -> None:
    """Also where the router's weights are NaN."""
    for tokens in (1, 3, 8):
        made = subject.call(tokens)
        none = Inputs(made.x, torch.full_like(made.ids, -1), made.weights * torch.nan)
        assert not subject.answer(none).view(torch.int16).any()
