"""Tuning on the device: measured once, kept, and the same bits before and after."""

from __future__ import annotations

import json

import pytest
import torch

from sm70_moe.errors import BackendError
from sm70_moe.evidence.trial import same_bits
from sm70_moe.kernels.native.tactics import BUCKETS, RULE, offered
from sm70_moe.plan.memory import backend
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.testing import settings

pytestmark = pytest.mark.gpu

TOKENS = (9, 16, 33, 128, 1000)


@pytest.fixture(scope="module")
def made(layers, tmp_path_factory: pytest.TempPathFactory):
    """Makes a layer of a service of its own that is asked to tune; all keep what they measure in one folder."""
    folder = tmp_path_factory.mktemp("tuned")
    plain = layers.make()

    def make():
        asked = settings({"tune_small_shapes": "1"}, SM70_MOE_KERNEL_CACHE=str(folder))
        service = AdmissionService(asked, policy=layers.service(plain.sizes).policies[0], machine=layers.machine())
        return layers.layer(service, plain.sizes)

    return make, folder


def test_bits_are_the_same_and_a_second_start_measures_nothing(made, layers) -> None:
    """Whatever was chosen; the second layer has the first one's plan."""
    make, folder = made
    plain, subject = layers.make(), make()
    tuned = subject.service.tune()
    assert [one.key.bucket for one in tuned] == list(BUCKETS)
    for one in tuned:
        assert set(one.times) | set(one.left_out) >= {RULE, one.tactic}
        assert not one.left_out, one
        assert all(time > 0 for time in one.times.values())
    for tokens in TOKENS:
        call = subject.mixed(tokens, seed=tokens)
        assert same_bits(subject.answer(call), plain.answer(call))
    entries = json.loads((folder / "tuned.json").read_text())["entries"]
    assert len(entries) == len(BUCKETS)
    again = make()
    assert all(not one.times for one in again.service.tune())
    assert again.layer.plan.digest == subject.layer.plan.digest


def test_every_tactic_has_the_rules_bits(made) -> None:
    """Mixed ids, fewer tokens than the bucket holds, and the bucket's own."""
    make, _ = made
    subject = make()
    runs = backend(subject.layer.plan.admission, "indexed")
    bound = runs._bind(subject.layer.banks)
    for bucket in (16, 128, 1024):
        names = offered(bound._case(bucket, subject.sizes.top_k, "float16"))
        for tokens in (bucket // 2 + 1, bucket):
            call = subject.mixed(tokens, seed=bucket)
            expected = subject.answer(call)
            for name in names[1:]:
                runs.take(subject.layer.banks, subject.sizes.top_k, {bucket: name})
                assert same_bits(subject.answer(call), expected), (bucket, tokens, name)
            runs.take(subject.layer.banks, subject.sizes.top_k, {})


def test_a_graph_that_is_captured_runs_what_was_chosen(made, graph_of) -> None:
    """And nothing is measured while one is."""
    make, _ = made
    subject = make()
    call = subject.call(16)
    out = torch.empty_like(call.x)
    refused = []

    def work() -> None:
        if torch.cuda.is_current_stream_capturing():
            with pytest.raises(BackendError, match="captured"):
                subject.service.tune()
            refused.append(True)
        subject.run(call.x, call.ids, call.weights, out)

    graph = graph_of(work)
    assert refused
    out.fill_(torch.nan)
    graph.replay()
    assert same_bits(out, subject.answer(call))
