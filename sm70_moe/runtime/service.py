"""AdmissionService: what an engine embeds.

Settings, policies, machine and backends are read once, when the service is made. Two services in
one process share nothing; one service may be used from several threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from sm70_moe.admission.admit import Admission, admit
from sm70_moe.decision import Finding, Status, obstacle_text
from sm70_moe.errors import DriftError, RankDisagreement, Sm70MoeError
from sm70_moe.facts import LayerFacts
from sm70_moe.living import Living
from sm70_moe.machine.machine import Machine
from sm70_moe.machine.probe import probe
from sm70_moe.plan.agreement import SECONDS, agree
from sm70_moe.plan.drift import Origin, Present, digest_now, drift
from sm70_moe.plan.memory import bank_shape
from sm70_moe.plan.plan import Plan
from sm70_moe.policy import Policy, choose_policy, read_operator
from sm70_moe.record.journal import Journal
from sm70_moe.record.sink import Sink, Sinks
from sm70_moe.runtime.kernels import Kernels, SecondTry
from sm70_moe.runtime.refusal import refusal, refuse_unmet
from sm70_moe.runtime.summary import Summary
from sm70_moe.runtime.wants import wants_native, wants_tuning
from sm70_moe.settings.settings import Settings

if TYPE_CHECKING:
    import torch.distributed as dist

    from sm70_moe.numbers.codes import WeightSource
    from sm70_moe.runtime.layer import MoELayer
    from sm70_moe.runtime.making import Maker
    from sm70_moe.runtime.proof import Proof
    from sm70_moe.runtime.tuning import Tuned
    from sm70_moe.runtime.warming import Warmed


class AdmissionService(Living):
    """Decides layers, keeps the journal, builds layers.

    Every argument has a default: settings from the environment, policies from the settings (all
    shipped ones, chosen by geometry, if none is set), the machine probed. `rank` names the journal's
    file; `sinks` are told beside the journal what it is told. Raises SettingsError or PolicyError for
    what cannot be read.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        policy: Policy | str | None = None,
        machine: Machine | None = None,
        rank: int = 0,
        sinks: Iterable[Sink] = (),
    ) -> None:
        self._from_environment = settings is None
        self._probed = machine is None
        self.settings, self.policies = read_operator(policy, settings)
        # an injected policy cannot drift; a file is found again wherever the process has gone since
        self._files = {} if isinstance(policy, Policy) else {os.path.abspath(p.origin): p.digest for p in self.policies}
        notices = self.settings.notices(self.policies)
        self.machine = self._probe() if machine is None else machine
        self._lock = threading.Lock()
        self._plans: dict[str, Plan] = {}
        self._refused: dict[str, Admission] = {}
        self._closed = self._tuned = False
        self._told: Summary | None = None
        self._left: dict[str, str] = {}
        self._maker: Maker | None = None
        self._layers: weakref.WeakValueDictionary[str, MoELayer] = weakref.WeakValueDictionary()
        self._captures: set[tuple[str, int, str | None]] = set()
        self._drifted: dict[str, Finding] = {}
        self._warned: set[tuple[Path, str]] = set()
        self._sinks = Sinks((Journal(self.settings.journal, rank), *sinks))
        weakref.finalize(self, self._sinks.flush)
        self._kernels = Kernels(self._sinks.event)
        for notice in notices:
            self._sinks.event("moe settings", "warning", variable=notice.name, text=notice.text)

    def policy_for(self, facts: LayerFacts) -> Policy:
        """The one policy that was asked for, else the shipped one with the layer's geometry."""
        return choose_policy(self.policies, facts)

    def admit(self, facts: LayerFacts) -> Plan:
        """Decide one layer and keep its plan; the same facts again give the same plan.

        Raises AdmissionRefused if an explicit `1` cannot be honoured, and Sm70MoeError for another
        layer of the same name or after `close()`. A layer that nothing can run is not an error: its
        plan has no routes.
        """
        with self._lock:
            known = self._plans.get(facts.layer)
            if known is not None and known.admission.facts == facts:
                return known
            if known is not None:
                raise Sm70MoeError(f"layer {facts.layer!r} was admitted before with other facts")
            if self._closed:
                raise Sm70MoeError(f"layer {facts.layer!r}: admission is closed, plans are frozen")
            admission = admit(self.policy_for(facts), self.settings, facts, self.machine, others=self.policies)
            told = self._refused.get(facts.layer)
            if told is None or (told.facts, told.decisions) != (facts, admission.decisions):
                self._sinks.admitted(admission)
            if admission.refused:
                self._refused[facts.layer] = admission
                raise refusal(admission, admission.refused)
            self._refused.pop(facts.layer, None)
            plan = self._plans[facts.layer] = self._kernels.settle(Plan(admission))
            return plan

    def layer(
        self,
        facts: LayerFacts,
        weights: WeightSource,
        *,
        device: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> MoELayer:
        """Admit a layer, prepare its banks, and return what runs it.

        `device` is where the banks go, the layer's own device if not given. `progress` is called with
        the number of experts done and of all of this rank, possibly from another thread. Banks come
        out of `settings.cache` where that has them. Once they are complete, `weights` is released;
        whatever is raised, it is left as it was. Raises AdmissionRefused also for a layer that no
        route can run, and what reading the weights raises.
        """
        from sm70_moe.reading.offers import release
        from sm70_moe.runtime.making import Maker

        with self._lock:
            maker = self._maker = self._maker or Maker(self.settings, partial(self._file_warning, "moe cache"))
        plan, second = self.admit(facts), SecondTry(self._kernels)
        while plan.layout is not None and bank_shape(plan.admission) is not None:
            made = maker.make(plan, weights, device or facts.device or "cpu", self._captured, progress)
            if made.layer is not None:
                for text in made.remarks:
                    self._sinks.event("moe weights", layer=plan.layer, text=text)
                release(weights)
                with self._lock:
                    self._layers[plan.layer] = made.layer
                return made.layer
            again = second.plan(plan, made.failed)
            if again is not None:
                with self._lock:
                    plan = self._plans[plan.layer] = again
            else:
                plan = self._unproven(plan, made.failed)  # takes a route from the plan, at most once each
        raise refusal(plan.admission, [plan.admission.last_resort])

    def _unproven(self, plan: Plan, failed: tuple[Proof, ...]) -> Plan:
        """The plan without routes that were wrong on the layer's own banks. Raises AdmissionRefused under `1`."""
        admission = plan.admission
        features = {route.name: route.route.feature or route.name for route in plan.routes}
        objections = {**admission.objections, **{features[proof.route]: proof.finding for proof in failed}}
        for proof in failed:
            self._sinks.event("moe proof", "warning", layer=plan.layer, **proof.record())
        again = admit(admission.policy, self.settings, admission.facts, self.machine, objections, others=self.policies)
        self._sinks.admitted(again)
        with self._lock:
            if again.refused:
                self._plans.pop(plan.layer, None)
                self._refused[plan.layer] = again
                raise refusal(again, again.refused)
            self._plans[plan.layer] = made = self._kernels.settle(Plan(again))
        return made

    def agree(self, group: dist.ProcessGroup | None = None, *, seconds: float = SECONDS) -> tuple[Plan, ...]:
        """Agree with the other ranks of a group on all plans so far; call it on every rank, before a kernel runs.

        Plans in which features were taken back replace the service's own and go to the sinks.
        Raises what `agreement.agree` raises; where this rank refused a layer, the others are told, and
        its own AdmissionRefused is raised again.
        """
        with self._lock:
            refused = [refusal(admission, admission.refused) for admission in self._refused.values()]
        if refused:
            self._tell(refused[0], group, seconds)
            raise refused[0]
        agreed = agree(self.plans(), group, seconds=seconds)
        for plan in agreed:
            with self._lock:
                changed = self._plans[plan.layer].digest != plan.digest
                self._plans[plan.layer] = plan
            if changed:
                self._sinks.admitted(plan.admission)
        return agreed

    @contextmanager
    def together(self, group: dist.ProcessGroup | None = None, *, seconds: float = SECONDS) -> Iterator[None]:
        """Admit a rank's layers inside of it, on every rank; at its end the ranks agree.

        An error inside is raised as it is, once the other ranks have been told which rank stops and
        why: they raise RankDisagreement with that text, instead of waiting for this one.
        """
        try:
            yield
        except Exception as error:
            self._tell(error, group, seconds)
            raise
        self.agree(group, seconds=seconds)

    def _tell(self, error: Exception, group: dist.ProcessGroup | None, seconds: float) -> None:
        """Say to the other ranks why this one stops; whoever does not hear it any more is no concern of ours."""
        with suppress(RankDisagreement):
            agree((), group, seconds=seconds, refused=f"{type(error).__name__}: {error}")

    def _captured(self, plan: Plan, tokens: int, route: str | None) -> None:
        """A graph keeps this route: tell it once, and freeze the plans."""
        key = (plan.layer, tokens, route)
        with self._lock:
            known = key in self._captures
            self._captures.add(key)
            self._closed = True
        if not known:
            self._sinks.event("moe capture", layer=plan.layer, tokens=tokens, route=route, plan=plan.digest)

    def tune(self, group: dist.ProcessGroup | None = None, *, seconds: float = SECONDS) -> tuple[Tuned, ...]:
        """Choose how living layers launch their batches, where plans ask for it, before `close()`: `tuning.tune`.

        Raises Sm70MoeError once plans are frozen, by `close()` or a capture, and what `tuning.tune` raises.
        """
        from sm70_moe.runtime.tuning import tune

        with self._lock:
            if self._closed:
                raise Sm70MoeError("tuning: admission is closed, plans are frozen")
            self._tuned, layers = True, list(self._layers.values())
        tuned = tune(layers, self.settings.kernel_cache, partial(self._file_warning, "moe tuning"), group, seconds)
        with self._lock:
            self._plans.update({layer.plan.layer: layer.plan for layer in layers})
        for one in tuned:
            self._sinks.event("moe tuning", "warning" if one.left_out else "info", **one.record())
        return tuned

    def warm_up(self, tokens: Iterable[int]) -> tuple[Warmed, ...]:
        """Run every living layer once for each of these token counts, as its plan runs them: `warming.warm_up`."""
        from sm70_moe.runtime.warming import warm_up

        with self._lock:
            layers = list(self._layers.values())
        warmed = warm_up(layers, tokens)
        self._sinks.event("moe warm-up", layers=len(layers), calls=sorted({f"{w.tokens} {w.route}" for w in warmed}))
        return warmed

    def plans(self) -> tuple[Plan, ...]:
        """All plans so far, in order of admission."""
        with self._lock:
            return tuple(self._plans.values())

    def leave(self, layer: str, why: str) -> None:
        """An admitted layer stays with the engine, which runs it itself: the summary counts it so, and says why."""
        with self._lock:
            self._left[layer] = why

    def summary(self) -> Summary:
        """Counts over all layers so far, refused ones too; told to the sinks if it is news, as are the proofs."""
        proven = self._maker.prover.news() if self._maker else None
        if proven is not None:
            self._sinks.event("moe proven", "info", **proven)
        with self._lock:
            summary = Summary.of(self._plans.values(), self._refused.values(), self._left)
            if self._told == summary:
                return summary
            self._told = summary
        self._sinks.event("moe summary", summary.level, **summary.record())
        return summary

    def drift(self) -> tuple[Finding, ...]:
        """What changed since this service was made: environment, policy files, build, devices.

        Only what the service read itself is looked at again; injected values cannot drift. Changes
        are reported, and told to the sinks once until they change further; never acted on.
        """
        findings = drift(self._origin(), self._present())
        changed = {finding.check: finding for finding in findings if finding.status is Status.FAIL}
        with self._lock:
            told, self._drifted = self._drifted, changed
        for check, finding in changed.items():
            if told.get(check) != finding:
                self._sinks.event("moe drift", "warning", **finding.record())
        return findings

    def close(self) -> Summary:
        """End admission: no layer is admitted any more, the plans are final.

        Raises AdmissionRefused if a required feature was admitted for no layer at all (possible only
        under `mixed_model = "admit-the-rest"`), and DriftError under `drift = "raise"`.
        """
        with self._lock:
            self._closed = True
        summary = self.summary()
        if not self._tuned and any(map(wants_tuning, self.plans())):
            self._sinks.event("moe tuning", "warning", text="asked for, but AdmissionService.tune was not called")
        self._sinks.flush()
        refuse_unmet(self.plans())
        changed = [f for f in self.drift() if f.status is Status.FAIL]
        if changed and any(p.on.drift == "raise" for p in self.policies):
            raise DriftError(changed, "; ".join(f"{f.check}: {obstacle_text(f)}" for f in changed))
        return summary

    def __enter__(self) -> AdmissionService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sinks.flush()
        if kind is None:
            self.close()

    def _file_warning(self, event: str, file: Path, text: str) -> None:
        with self._lock:
            told = (file, text) in self._warned
            self._warned.add((file, text))
        if not told:
            self._sinks.event(event, "warning", file=str(file), text=f"{file}: {text}")

    def _probe(self) -> Machine:
        return probe(
            native=wants_native(self.policies, self.settings),
            kernels=self.settings.kernels,
            dependent=self.settings.dependent_launch,
            kernel_cache=self.settings.kernel_cache,
        )

    def _origin(self) -> Origin:
        aliases = frozenset(name for p in self.policies for feature in p.features.values() for name in feature.env)
        return Origin(self.settings, self._files, self.machine, aliases)

    def _present(self) -> Present:
        machine = self.machine
        if self._probed:
            machine = probe(native=machine.build_looked_up, kernels=self.settings.kernels, backends=machine.backends)
        environment = os.environ if self._from_environment else self.settings
        return Present(environment, {path: digest_now(path) for path in self._files}, machine)
