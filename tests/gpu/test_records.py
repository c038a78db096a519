"""What a native admission leaves on record: the route, the build, the image, the self-test."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from sm70_moe.decision import Outcome
from sm70_moe.kernels.build import INSTALLED
from sm70_moe.kernels.build.images import Cubins

pytestmark = pytest.mark.gpu

FEATURES = ("qpn_m1", "grouped_decode")


@pytest.fixture
def recorded(layers, tmp_path):
    """A layer with the lines of its journal, and the events that were logged."""
    sizes = layers.make().sizes
    with capture_logs() as events:
        service = layers.service(sizes, metadata="3-byte", SM70_MOE_JOURNAL=str(tmp_path / "journal.jsonl"))
        subject = layers.layer(service, sizes)
        service.summary()
    lines = [json.loads(line) for line in (tmp_path / "journal.rank0.jsonl").read_text().splitlines()]
    return subject, lines, events


def test_the_journal_names_route_build_and_self_test(recorded) -> None:
    """Each native route's line has the build's id, the architecture of the image and the passed self-test."""
    subject, lines, _ = recorded
    build = subject.layer.plan.admission.machine.build
    for feature in FEATURES:
        (line,) = [line for line in lines if line["event"] == "moe decision" and line["feature"] == feature]
        found = {f["check"]: (f["status"], f["observed"]) for f in line["findings"]}
        assert line["outcome"] == "admitted"
        assert line["plan"] == subject.layer.plan.digest
        assert found["native build"] == ("pass", build.id)
        assert found["native image"] == ("pass", subject.layer.plan.admission.device.architecture)
        assert found["self-test"] == ("pass", "known answer")


def test_the_build_is_the_installed_one(recorded) -> None:
    """The id that is on record is that of the folder whose images run, and the plan's digest depends on it."""
    subject, _, _ = recorded
    admission = subject.layer.plan.admission
    assert admission.machine.build.id == Cubins.open(INSTALLED).id == admission.machine.build.expected
    assert subject.layer.plan.fields()["build"] == admission.machine.build.id
    assert admission.layout.tag == "octet32/3-byte/group-32/interleaved/batched"


def test_what_an_operator_reads(recorded) -> None:
    """An event for each decision, and the summary that counts them."""
    _, _, events = recorded
    outcomes = {e["feature"]: e["outcome"] for e in events if e["event"] == "moe decision"}
    assert {feature: outcomes[feature] for feature in FEATURES} == dict.fromkeys(FEATURES, Outcome.ADMITTED)
    (summary,) = [e for e in events if e["event"] == "moe summary"]
    assert {feature: summary["admitted"][feature] for feature in FEATURES} == dict.fromkeys(FEATURES, "1/1")
