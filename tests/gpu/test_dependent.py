"""Dependent launch: W2 may start before W13 has ended, and the result has the same bits."""

from __future__ import annotations

import pytest
import torch

from sm70_moe.evidence.trial import Inputs, same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["4-byte", "3-byte", "2.5-byte"])
def pair(request: pytest.FixtureRequest, layers):
    """The same layer twice: with dependent launch, and with the setting that turns it off."""
    device = layers.machine().device("cuda:0")
    if device.capability < (9, 0):
        pytest.skip(f"{device.architecture} has no dependent launch")
    return tuple(layers.make(metadata=request.param, dependent=dependent) for dependent in (True, False))


@pytest.mark.parametrize("kind", ["call", "mixed"])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_the_same_bits(pair, tokens: int, kind: str) -> None:
    """Also in the activations between W13 and W2."""
    call = getattr(pair[0], kind)(tokens, seed=tokens)
    found = []
    for subject in pair:
        out = torch.full_like(call.x, torch.nan)
        inner = call.x.new_full((*call.ids.shape, subject.sizes.intermediate), torch.nan)
        subject.run(call.x, call.ids, call.weights, out, inner)
        found.append((out, inner))
    assert same_bits(found[0][0], found[1][0])
    assert same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_a_chain_of_layers(pair, tokens: int) -> None:
    """Each call works on the output of the one before, so that one that starts too early is seen."""
    call = pair[0].mixed(tokens, seed=1)
    ends = []
    for subject in pair:
        x = call.x
        for _ in range(32):
            x = torch.nn.functional.layer_norm(subject.answer(Inputs(x, call.ids, call.weights)), x.shape[1:])
        ends.append(x)
    assert same_bits(*ends)


def test_both_are_what_they_say(pair) -> None:
    """The self-test passed with dependent launch, so that the default really is one."""
    for subject, wanted in zip(pair, (True, False), strict=True):
        for name in ("qpn", "grouped"):
            native = subject.layer.plan.admission.machine.backends[name]
            assert native._bind(subject.layer.banks).dependent is wanted
