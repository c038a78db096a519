"""One model in one process: its settings, decisions and layers, from the first layer to the last."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sm70_moe.checkpoint.config import describe
from sm70_moe.checkpoint.fields import Fields
from sm70_moe.checkpoint.model_types import read_model_types
from sm70_moe.decision import obstacle_text
from sm70_moe.engines.arrivals import ArrivedSource
from sm70_moe.engines.vllm.host import symbol
from sm70_moe.engines.vllm.limits import require_possible
from sm70_moe.engines.vllm.names import SECTION
from sm70_moe.engines.vllm.options import read_settings
from sm70_moe.engines.vllm.told import HostLog, table
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.facts import LayerFacts
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.speed import slow_tokens
from sm70_moe.runtime.layer import MoELayer
from sm70_moe.runtime.service import AdmissionService
from sm70_moe.runtime.wants import wants_tuning
from sm70_moe.settings.flags import FlagState

PLANS = f"{SECTION}.plans"
"""Key of `additional_config` under which the plans' digest stands, once they are agreed."""


class Engine:
    """Admits every layer while vLLM builds the model; prepares them once their weights are there.

    vLLM builds all layers before it loads any, so that all plans are known when the first layer is
    prepared: then the ranks agree. After the last one admission is closed. `host` is the `VllmConfig`.
    """

    def __init__(self, host: Any) -> None:
        """Raises SettingsError or PolicyError for what cannot be read, BackendError for what cannot be had."""
        require_possible(host)
        self.host = host
        rank = world_rank()
        self._first = rank == 0
        sinks = [HostLog()] if self._first else []
        self.service = AdmissionService(read_settings(host.additional_config), rank=rank, sinks=sinks)
        self.dummy = host.load_config.load_format == "dummy"
        types = read_model_types(self.service.settings.model_types)
        self.model = describe(Fields(Path("config.json"), host.model_config.hf_config.to_dict()), types)
        self._waiting: dict[str, Plan] = {}
        self._ours: set[str] = set()
        self.methods: list[Any] = []  # those with a layer
        self._deciding = ExitStack()
        self._shared = rank_group() is not None
        if self._shared:
            self._deciding.enter_context(self.service.together(rank_group()))
        self._agreed = False
        self.closed = False

    def admit(self, facts: LayerFacts) -> Plan:
        """Decide a layer; raises AdmissionRefused where an explicit `1` cannot be honoured."""
        return self.service.admit(facts)

    def spared(self, plan: Plan) -> str:
        """Why an admitted layer is better left to a host that can run it; "" if it is ours.

        Raises SettingsError where nothing may be taken, and a flag asks for this layer.
        """
        take = self.service.settings.take
        required = [d.feature for d in plan.decisions if d.flag == FlagState.REQUIRE and d.admitted]
        if take == "none":
            if required:
                raise SettingsError(
                    f"SM70_MOE_TAKE='none' leaves {plan.layer} to vLLM, and flags at 1 ask for {', '.join(required)}; "
                    "accepted are native or all, or flags that are unset or 0"
                )
            return "SM70_MOE_TAKE=none"
        slow = slow_tokens(plan, self.host.scheduler_config.max_num_batched_tokens)
        if take == "all" or required or not slow:
            return ""
        return f"portable for {slow} here; SM70_MOE_TAKE=all takes them"

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """What is raised inside, while the model is built, is told to the other ranks: they do not wait."""
        try:
            yield
        except Exception:
            if not self._agreed:
                self._agreed = True
                self._deciding.__exit__(*sys.exc_info())
            raise

    def expect(self, plan: Plan) -> None:
        """The layer will be prepared by us."""
        self._waiting[plan.layer] = plan
        self._ours.add(plan.layer)

    def prepare(self, layer: str, source: ArrivedSource, device: str) -> MoELayer:
        """Agree with the other ranks, the first time, and make the layer's banks.

        Raises RankDisagreement, and for the last layer what `AdmissionService.close` raises.
        """
        self.agree()
        if layer not in self._waiting:
            raise BackendError(f"{layer}: its banks are made; weights cannot be loaded a second time")
        made = self.service.layer(self._waiting.pop(layer).admission.facts, source, device=device)
        self._end()
        return made

    def leave(self, method: Any) -> Any:
        """The host's method of a layer that it runs; what was decided is written once the weights are there.

        A process of vLLM may be killed in the end, so that waiting for its last breath is too late. In a
        model without any layer of ours there is nothing but the host's methods to hear it from.
        """
        process = method.process_weights_after_loading

        def end_and_process(layer: Any) -> None:
            self._end()
            process(layer)

        method.process_weights_after_loading = end_and_process
        return method

    def _end(self) -> None:
        """Close admission when no layer waits any more; raises what `AdmissionService.close` raises."""
        if not self._waiting and not self.closed:
            self._tell()
            self._tune()
            self.service.close()
            self.closed = True

    def _tell(self) -> None:
        """The table of decisions, once and from the first rank: before a weight is loaded where any layer is ours."""
        if self._first:
            self._first = False
            table(self.service.plans())

    def _tune(self) -> None:
        """Where it is asked for, with the ranks that share layers; nothing was compiled yet for the plans before."""
        if any(map(wants_tuning, self.service.plans())):
            self.service.tune(symbol("get_tp_group")().cpu_group)
            for method in self.methods:
                method.digest = method.experts.plan.digest
            self._note_plans({plan.layer: plan for plan in self.service.plans() if plan.layer in self._ours})

    def agree(self) -> None:
        """Agree with the other ranks, once: when the first tensor comes, since all layers are built then.

        Raises RankDisagreement.
        """
        if self._agreed:
            return
        self._agreed = True
        self._deciding.close()
        if self._shared:
            agreed = {plan.layer: plan for plan in self.service.plans()}
            self._waiting = {layer: agreed[layer] for layer in self._waiting}
        self._note_plans(self._waiting)
        self._tell()

    def _note_plans(self, plans: Mapping[str, Plan]) -> None:
        """Put the plans into what vLLM makes its compile cache's key of.

        Compiled graphs hold plan digests; without this a cache from before a flag changed would fit.
        """
        digests = "".join(plan.digest for _, plan in sorted(plans.items()))
        additional = self.host.additional_config
        if isinstance(additional, dict):
            additional[PLANS] = hashlib.sha256(digests.encode()).hexdigest()


def reasons(plan: Plan) -> str:
    """Why nothing can run a layer."""
    return "; ".join(f"{f.check}: {obstacle_text(f)}" for f in plan.admission.last_resort.obstacles)


def rank_group() -> Any:
    """The CPU group of the ranks that share layers; None for a single rank."""
    group = symbol("get_tp_group")()
    return group.cpu_group if group.world_size > 1 else None


def world_rank() -> int:
    return int(symbol("get_world_group")().rank)
