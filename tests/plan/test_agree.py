"""`agree` with the other ranks' answers pretended: who raises, who falls back, what is asked twice."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from sm70_moe.admission.admit import admit
from sm70_moe.errors import RankDisagreement
from sm70_moe.plan import agreement
from sm70_moe.plan.agreement import agree, fallen_back, reconcile, report
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import load_policy
from sm70_moe.testing import contract_facts, fake_machine, settings

FIRST = load_policy("qwen3.8-flash-next-awq-tp4")
LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def plans(flags: dict[str, str] | None = None, build: str = "fake", **changes: object) -> list[Plan]:
    made = [contract_facts(FIRST, name, index=number, **changes) for number, name in enumerate(LAYERS)]
    return [Plan(admit(FIRST, settings(flags), facts, fake_machine(build=build))) for facts in made]


class Ranks:
    """Three ranks, of which this is number 1; the two others do what they must on their own plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: Sequence[list[Plan]], refused: str = "") -> None:
        self.others, self.refused, self.asked = [others[0], [], others[1]], refused, []
        monkeypatch.setattr(dist, "get_rank", lambda group: 1)
        monkeypatch.setattr(agreement, "gather", self.gather)

    def gather(self, mine: bytes, group: object, seconds: float) -> list[bytes]:
        self.asked.append((group, seconds))
        said, fields = json.loads(mine)
        everybody = [report(self.others[0]), fields, report(self.others[2])]
        answers = [json.dumps([self.refused if rank == 2 else "", one]).encode() for rank, one in enumerate(everybody)]
        if not said:  # and then they fall back, as this one does
            verdict = reconcile(everybody)
            for rank in (0, 2):
                self.others[rank] = list(
                    fallen_back(self.others[rank], verdict, lambda lack, rank=rank: lack.rank != rank)
                )
        answers[1] = mine
        return answers


def routes(plan: Plan) -> list[str]:
    return [route.name for route in plan.routes]


def test_alike_ranks_keep_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once, with the group and the time that were given."""
    mine = plans()
    ranks = Ranks(monkeypatch, [plans(), plans()])
    group = object()
    assert agree(mine, group, seconds=3.0) == tuple(mine)  # type: ignore[arg-type]  # only handed on
    assert ranks.asked == [(group, 3.0)]


def test_what_another_rank_lacks_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every layer; a second round compares what is left."""
    ranks = Ranks(monkeypatch, [plans(), plans(build="missing")])
    agreed = agree(plans())
    assert [routes(plan) for plan in agreed] == [["legacy_single_token", "legacy"]] * 2
    assert len(ranks.asked) == 2


def test_what_this_rank_lacks_it_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own findings stay; none of another rank is put beside them."""
    Ranks(monkeypatch, [plans(), plans()])
    mine = plans({"grouped_decode": "0"})
    agreed = agree(mine)
    assert [plan.digest for plan in agreed] == [plan.digest for plan in mine]
    checks = {f.check for plan in agreed for d in plan.decisions for f in d.findings}
    assert "other ranks" not in checks


def test_what_is_required_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken back where a rank requires it, and nobody is asked again."""
    ranks = Ranks(monkeypatch, [plans(), plans({"qpn_m1": "0"})])
    with pytest.raises(RankDisagreement, match="qpn_m1 is required on rank 1, not admitted on rank 2"):
        agree(plans({"qpn_m1": "1"}))
    assert len(ranks.asked) == 1


def test_a_policy_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's word is enough."""
    Ranks(monkeypatch, [plans(), plans({"qpn_m1": "0"})])
    mine = plans()
    monkeypatch.setattr(agreement, "lenient", lambda reports: not reports)
    with pytest.raises(RankDisagreement, match=r"rank 2: .* flags.qpn_m1 is 'off', 'auto' on rank 0"):
        agree(mine)


def test_what_does_not_agree_after_falling_back_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another geometry is no matter of features."""
    ranks = Ranks(monkeypatch, [plans(), plans(experts=256)])
    with pytest.raises(RankDisagreement, match=r"facts\.experts is 256, 512 on rank 0"):
        agree(plans())
    assert len(ranks.asked) == 2


def test_a_rank_that_refuses_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words; and what this rank refuses is said to the others."""
    Ranks(monkeypatch, [plans(), plans()], refused="no layer 3")
    with pytest.raises(RankDisagreement, match=r"^rank 2 refused: no layer 3$"):
        agree(plans())
    Ranks(monkeypatch, [plans(), plans()])
    with pytest.raises(RankDisagreement, match=r"^rank 1 refused: out of memory$"):
        agree((), refused="out of memory")
