"""Making a layer of a plan: banks, working memory, and the proof that the kernels are right on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.banks.cache import BankCache
from sm70_moe.banks.reach import reach_text
from sm70_moe.decision import obstacle_text
from sm70_moe.kernels.protocol import Backend
from sm70_moe.numbers.codes import WeightSource
from sm70_moe.plan.memory import backend
from sm70_moe.plan.plan import Plan
from sm70_moe.reading.loading import Progress
from sm70_moe.reading.offers import remarks
from sm70_moe.reading.shard import split
from sm70_moe.runtime.arena import Arena
from sm70_moe.runtime.layer import Captured, MoELayer
from sm70_moe.runtime.preparation import Prepared, Warn, cached_banks, prepare_banks
from sm70_moe.runtime.proof import Proof, Prover
from sm70_moe.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Made:
    """A layer that is ready; None where native routes `failed` their proof. `kept`: its banks were a file's.

    `remarks` are what is to be said of the weights' values, read now or when the banks were made.
    """

    layer: MoELayer | None
    failed: tuple[Proof, ...] = ()
    kept: bool = False
    remarks: tuple[str, ...] = ()


def told(plan: Plan, banks: Banks, weights: WeightSource) -> tuple[str, ...]:
    """What is to be said of a layer's weights: scales that became 0, sums of W2 that can leave FP16."""
    facts = plan.admission.facts
    first = split(facts.experts or 0, facts.expert_parallel or 1, facts.expert_rank or 0).start
    reach = reach_text(banks.reaches, first) if facts.activations == "float16" else ""
    return (*remarks(weights), *filter(None, [reach]))


class Maker:
    """Makes the layers of one engine; those of a device share its working memory."""

    def __init__(self, settings: Settings, warn: Warn) -> None:
        self.settings, self.warn = settings, warn
        self.prover = Prover()
        self._arenas: dict[str, Arena] = {}
        self._cache: BankCache | None = None
        self._lock = threading.Lock()

    def make(
        self,
        plan: Plan,
        weights: WeightSource,
        place: str,
        captured: Captured,
        progress: Callable[[int, int], None] | None,
    ) -> Made:
        """Prepare the banks of a plan that has routes, and try its native routes on them."""
        backends = {route.backend: backend(plan.admission, route.backend) for route in plan.routes}
        made = self._made(plan, weights, backends, place, captured, progress)
        if made.failed and made.kept:  # the file is wrong or the kernels are: banks of the weights tell
            distrust = f"wrong on the layer's own weights ({obstacle_text(made.failed[0].finding)})"
            made = self._made(plan, weights, backends, place, captured, progress, distrust)
        return made

    def _made(
        self,
        plan: Plan,
        weights: WeightSource,
        backends: dict[str, Backend],
        place: str,
        captured: Captured,
        progress: Progress | None,
        distrust: str = "",
    ) -> Made:
        prepared = self._banks(plan, weights, backends[plan.routes[-1].backend], place, progress, distrust)
        banks, space = prepared.banks, self._arena(prepared.banks.device)
        space.reserve(plan.memory.resident if plan.memory else 0)
        proofs = self.prover.prove(plan, banks, weights, backends, space) if self.settings.proof else ()
        failed = tuple(proof for proof in proofs if not proof.ok)
        layer = None if failed else MoELayer(plan, banks, backends, captured, space)
        return Made(layer, failed, prepared.file is not None, told(plan, banks, weights))

    def _banks(
        self, plan: Plan, weights: WeightSource, last: Backend, place: str, progress: Progress | None, distrust: str
    ) -> Prepared:
        if self.settings.cache is None:
            return Prepared(prepare_banks(plan, weights, last, place, progress))
        with self._lock:
            if self._cache is None:
                self._cache = BankCache(self.settings.cache)
                self._cache.sweep()  # of what an engine that was killed has left
        return cached_banks(plan, weights, last, place, self._cache, self.warn, progress, distrust)

    def _arena(self, device: torch.device) -> Arena:
        with self._lock:
            return self._arenas.setdefault(str(device), Arena(device))
