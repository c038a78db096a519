"""The backends that run the package's own kernels (`decode`, `qpn`, `grouped`, `indexed`)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm70_moe.decision import Finding
from sm70_moe.errors import BackendError
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.build.specialiser import Specialiser
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import FUSED, capability
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.driver import Driver
from sm70_moe.kernels.native.launch import Launcher
from sm70_moe.kernels.native.refusal import LaunchRefused, Refusal
from sm70_moe.kernels.native.residency import Residency
from sm70_moe.kernels.native.steps import OPTIONS, STEPS, Route
from sm70_moe.layout import BankLayout, BankShape

if TYPE_CHECKING:
    from sm70_moe.banks.banks import Banks
    from sm70_moe.kernels.call import Call
    from sm70_moe.kernels.native.bound import Bound
    from sm70_moe.kernels.protocol import Workspace
    from sm70_moe.numbers.codes import WeightSource

HALF = 2
"""Bytes of an FP16 element."""

BLOCK = 512
"""Bytes that torch's CUDA allocator rounds up to."""

DEPENDENT_FROM = 90
"""sm_90 is the first architecture with programmatic dependent launch."""


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """A backend whose kernels come with the native build.

    `folder` is another build than the package's own. `dependent`: kernels of a call may overlap
    where the device can do that; `fused`: they are one kernel, an option of `qpn`. `driver` stands in
    for CUDA in tests. What `specialiser` made for a layer's sizes goes before the build's kernels for any.
    """

    name: str
    native: bool = True
    folder: Path | None = None
    dependent: bool = True
    fused: bool = False
    driver: Callable[[], Driver] | None = field(default=None, compare=False)
    specialiser: Specialiser | None = field(default=None, compare=False, repr=False)
    _state: _State = field(default_factory=lambda: _State(), compare=False, repr=False)

    @property
    def route(self) -> Route | None:
        """How its calls are run; None as long as nobody wrote its kernels."""
        return STEPS.get(FUSED if self.fused else self.name)

    @property
    def options(self) -> Set[str]:
        return OPTIONS.get(self.name, frozenset())

    def can(self, architecture: str | None) -> Capability | None:
        """As its kernels are declared, with the sizes of their manifests; nothing on a CPU."""
        if self.route is None or architecture == "cpu":
            return None
        return capability(FUSED if self.fused else self.name, architecture)

    def configured(self, folder: Path | None, dependent: bool, fused: bool = False) -> NativeBackend:
        """The same backend for another build, with dependent launch on or off, in one launch or in two."""
        if fused and FUSED not in self.options:
            raise BackendError(f"backend {self.name!r}: has no option {FUSED}, only {sorted(self.options)}")
        return replace(self, folder=folder, dependent=dependent, fused=fused, _state=_State())

    def with_options(self, names: Set[str]) -> NativeBackend:
        """The backend for layers with these options; always the same one for the same options."""
        if self.fused is (FUSED in names):
            return self
        with self._state.lock:
            if self._state.other is None:
                self._state.other = self.configured(self.folder, self.dependent, not self.fused)
                self._state.other._state.other = self
            return self._state.other

    def check(self, facts: LayerFacts) -> tuple[Finding, ...]:
        """Nothing beyond what its kernels are declared to run."""
        return ()

    def workspace(self, shape: BankShape, top_k: int, tokens: int) -> int:
        """Bytes of the FP16 activations between W13 and W2, (M, k, I), of scratch, and of what the kernels keep.

        A long call is run in pieces, and takes no more than one of them.
        """
        if self.route is None or not tokens:
            return 0
        piece = min(tokens, self.route.most(shape, top_k)) if self.route.pieces else tokens
        inner = whole(piece * top_k * shape.intermediate * HALF)
        return inner + whole(self.route.lent(shape, top_k, piece)) + whole(self.route.scratch)

    def prepare(self, source: WeightSource, layout: BankLayout, shape: BankShape, device: str) -> Banks:
        """Read this rank's weights into banks; every built-in backend reads the same ones."""
        from sm70_moe.reading.loading import prepare

        return prepare(source, layout, shape, device)

    def ready(self, banks: Banks, top_k: int) -> None:
        """Load and plan everything for a layer now: calls after that allocate nothing."""
        self._bind(banks).ready(top_k)

    def version(self, banks: Banks, top_k: int, tokens: int) -> object:
        """The kernels of a call, by name."""
        launcher = self.launcher(str(banks.device))
        case = Case(banks.shape, banks.layout, top_k, tokens, launcher.architecture, self._may_depend(launcher))
        return tuple((step.source, step.kernel) for step in self._require_route().steps(case))

    def tactics(self, banks: Banks, top_k: int, tokens: int, dtype: str) -> tuple[str, ...]:
        """What calls of up to `tokens` may be run by, the rule first; nothing where there is no choice."""
        return self._bind(banks).offered(tokens, top_k, dtype)

    def timed(self, banks: Banks, call: Call, tactic: str, space: Workspace | None) -> float:
        """Microseconds of a call by a tactic; see `Tunable.timed`."""
        return self._bind(banks).timed(call, tactic, space)

    def take(self, banks: Banks, top_k: int, chosen: Mapping[int, str]) -> None:
        """Run calls by these tactics from now on; see `Tunable.take`."""
        self._bind(banks).take(top_k, chosen)

    def run(self, banks: Banks, call: Call, space: Workspace | None = None) -> None:
        """Write the layer's output on torch's current stream; see `Backend.run`.

        Raises BackendError without a build or kernels for this device, and for arguments that the
        route's call conditions exclude; LaunchRefused with the driver's text.
        """
        # found by a tensor and not by the Banks: a tensor tells when it goes away
        bound = self._state.bound.get(id(banks.w13.planes["words"])) if self._state.bound else None
        (bound or self._bind(banks))(banks, call, space)

    def self_test(self, device: str) -> str:
        """The known-answer call on "cuda:N": "" is right, other text says what went wrong.

        On devices with dependent launch it is tried with and, if that fails, without; later calls
        do what passed.
        """
        from sm70_moe.kernels.native.selftest import self_test

        try:
            route, launcher = self._require_route(), self.launcher(device)
            may = self._may_depend(launcher)
            problem = self_test(launcher, route, may)
            if problem and may:
                self._state.plain.add(launcher.device)
                problem = self_test(launcher, route, False)
            return problem
        except LaunchRefused as refused:
            return Refusal(str(refused))
        except BackendError as error:
            return str(error)

    def residency(self, device: str) -> Residency | str:
        """What "cuda:N" holds at once of that cooperative kernel of its own of which it holds the fewest blocks.

        A text says what went wrong.
        """
        from sm70_moe.kernels.native.selftest import cooperative_steps

        try:
            launcher = self.launcher(device)
            found = [launcher.residency(*each) for each in cooperative_steps(launcher, self._require_route())]
        except LaunchRefused as refused:
            return Refusal(str(refused))
        except BackendError as error:
            return str(error)
        return min(found, key=lambda one: one.each) if found else "no kernel of this device is launched cooperatively"

    def launcher(self, device: str) -> Launcher:
        """The kernels on a device, opened once. Raises BackendError where there is no build, or a stale one."""
        with self._state.lock:
            if device not in self._state.launchers:
                driver = self.driver() if self.driver else None
                self._state.launchers[device] = Launcher.open(device, self.folder, driver, self.specialiser)
            return self._state.launchers[device]

    def _bind(self, banks: Banks) -> Bound:
        from sm70_moe.kernels.native.bound import Bound

        route = self._require_route()
        anchor = banks.w13.planes["words"]
        bound = self._state.bound.get(id(anchor))
        if bound is None:
            launcher = self.launcher(str(banks.device))
            bound = Bound(self.name, launcher, route, banks, self._may_depend(launcher))
            self._state.bound[id(anchor)] = bound
            weakref.finalize(anchor, self._state.bound.pop, id(anchor), None).atexit = False
        return bound

    def _may_depend(self, launcher: Launcher) -> bool:
        able = int(launcher.architecture.removeprefix("sm_")) >= DEPENDENT_FROM
        return self.dependent and able and not self.fused and launcher.device not in self._state.plain

    def _require_route(self) -> Route:
        if self.route is None:
            raise BackendError(f"backend {self.name!r}: this release has no kernels for it")
        return self.route


def whole(nbytes: int) -> int:
    """As torch's allocator hands it out: whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class _State:
    """What a backend has opened: launchers by device, layers by the identity of a tensor of theirs.

    `plain` are devices on which dependent launch failed its self-test.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.launchers: dict[str, Launcher] = {}
        self.bound: dict[int, Bound] = {}
        self.plain: set[int] = set()
        self.other: NativeBackend | None = None  # the one with the other options
