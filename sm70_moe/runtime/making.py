"""Making a layer of a plan: banks, working memory, and the proof that the kernels are right on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sm70_moe.banks.banks import Banks
from sm70_moe.banks.cache import BankCache
from sm70_moe.kernels.protocol import Backend
from sm70_moe.numbers.codes import WeightSource
from sm70_moe.plan.memory import backend
from sm70_moe.plan.plan import Plan
from sm70_moe.reading.loading import Progress
from sm70_moe.runtime.arena import Arena
from sm70_moe.runtime.layer import Captured, MoELayer
from sm70_moe.runtime.preparation import Warn, cached_banks, prepare_banks
from sm70_moe.runtime.proof import Proof, Prover
from sm70_moe.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Made:
    """A layer that is ready; None where native routes `failed` their proof."""

    layer: MoELayer | None
    failed: tuple[Proof, ...] = ()


class Maker:
    """Makes the layers of one engine; those of a device share its working memory."""

    def __init__(self, settings: Settings, warn: Warn) -> None:
        self.settings, self.warn = settings, warn
        self.prover = Prover()
        self._arenas: dict[str, Arena] = {}
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
        banks = self._banks(plan, weights, backends[plan.routes[-1].backend], place, progress)
        space = self._arena(banks.device)
        space.reserve(plan.memory.resident if plan.memory else 0)
        proofs = self.prover.prove(plan, banks, weights, backends, space) if self.settings.proof else ()
        failed = tuple(proof for proof in proofs if not proof.ok)
        return Made(None if failed else MoELayer(plan, banks, backends, captured, space), failed)

    def _banks(self, plan: Plan, weights: WeightSource, last: Backend, place: str, progress: Progress | None) -> Banks:
        if self.settings.cache is None:
            return prepare_banks(plan, weights, last, place, progress)
        return cached_banks(plan, weights, last, place, BankCache(self.settings.cache), self.warn, progress)

    def _arena(self, device: torch.device) -> Arena:
        with self._lock:
            return self._arenas.setdefault(str(device), Arena(device))
