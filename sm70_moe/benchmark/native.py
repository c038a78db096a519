"""Arms that run the package's own routes: another one is a row of `NATIVES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sm70_moe.benchmark.stand import Stand
from sm70_moe.benchmark.timing import Layer
from sm70_moe.decision import Finding, obstacle_text
from sm70_moe.errors import BackendError
from sm70_moe.evidence.trial import Runs
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.native.backend import DEPENDENT_FROM, NativeBackend
from sm70_moe.kernels.native.bound import addresses
from sm70_moe.kernels.native.case import Case
from sm70_moe.kernels.native.launch import Program, Step
from sm70_moe.kernels.native.steps import bank_arguments, numbers
from sm70_moe.plan.plan import Plan
from sm70_moe.record.explanation import reason_name
from sm70_moe.timings import BOTH, DEPENDENT, FUSED, OURS, PLAIN, W2, W13

Configure = Callable[[NativeBackend, bool], NativeBackend]
"""The plan's backend, and whether kernels may overlap -> the backend of an arm. Raises BackendError."""


@dataclass(frozen=True, slots=True)
class Native:
    """One way to run our routes. `ways` are pairs of launch and part."""

    name: str
    configure: Configure
    ways: tuple[tuple[str, str], ...]


def as_planned(backend: NativeBackend, dependent: bool) -> NativeBackend:
    return backend.configured(backend.folder, dependent)


def in_one_launch(backend: NativeBackend, dependent: bool) -> NativeBackend:
    return backend.configured(backend.folder, dependent, fused=True)


NATIVES: tuple[Native, ...] = (
    Native(OURS, as_planned, ((PLAIN, BOTH), (DEPENDENT, BOTH), (PLAIN, W13), (PLAIN, W2))),
    Native(FUSED, in_one_launch, ((PLAIN, BOTH),)),
)
"""Whether or not the policy admits an option: here it is to be found out what it is worth."""


def native_layer(native: Native, launch: str, part: str, stand: Stand) -> tuple[Layer, Runs | None]:
    """The layer of an arm, and what is judged of it. Raises BackendError for what cannot run here, with the reason."""
    setup = stand.setup
    found = admitted(setup.plan, stand.tokens)
    if launch == DEPENDENT:
        require_dependent(found, setup.device)
    made = setup.native(native.name, launch, found.name, lambda: native.configure(found, launch == DEPENDENT))
    if part == BOTH:
        return whole(stand, made), partial(made.run, setup.bank(stand.routing.layers - 1))
    return partly(stand, made, part), None


def whole(stand: Stand, backend: NativeBackend) -> Layer:
    """As an engine calls it."""
    setup, separate = stand.setup, stand.separate()

    def layer(n: int) -> None:
        separate(n)
        backend.run(setup.bank(n), Call(stand.x, stand.ids, stand.weights, stand.out), setup.space)

    return layer


def partly(stand: Stand, backend: NativeBackend, part: str) -> Layer:
    """One of the two launches, on activations that the stand has."""
    setup, separate, programs = stand.setup, stand.separate(), part_programs(stand, backend, part)

    def layer(n: int) -> None:
        separate(n)
        programs[n % len(programs)](setup.stream())

    return layer


def part_programs(stand: Stand, backend: NativeBackend, part: str) -> list[Program]:
    """A program for each bank. Raises BackendError for a backend without a launch of its own for the part."""
    setup, route = stand.setup, backend.route
    launcher = backend.launcher(setup.device)
    dtype = setup.plan.admission.facts.activations or "float16"
    case = Case(setup.shape, setup.layout, setup.top_k, stand.tokens, launcher.architecture, False, dtype)
    steps = [step for step in route.steps(case) if is_part(step, part)] if route else []
    if not steps:
        raise BackendError(f"backend {backend.name!r}: no launch of its own for {part}")
    own = {"x": stand.x, "ids": stand.ids, "weights": stand.weights, "out": stand.out, "intermediate": stand.inner}
    values = numbers(case) | {name: tensor.data_ptr() for name, tensor in own.items()} | {"scratch": 0}
    sizes = case.geometry.record()
    return [
        launcher.program(
            steps, values=values | bank_arguments(addresses("w13", b.w13) | addresses("w2", b.w2)), sizes=sizes
        )
        for b in setup.banks
    ]


def is_part(step: Step, part: str) -> bool:
    """Kernels are named after the product that they compute: w13_1, w2_8."""
    return step.kernel.partition("_")[0] == part


def admitted(plan: Plan, tokens: int) -> NativeBackend:
    """The native backend that calls of this many tokens run on. Raises BackendError with every reason if none."""
    backends = plan.admission.machine.backends
    for route in plan.reachable(tokens):
        found = backends[route.backend]
        if isinstance(found, NativeBackend):
            return found
    raise BackendError(refusals(plan, tokens))


def refusals(plan: Plan, tokens: int) -> str:
    """Why no native route takes calls of this many tokens."""
    policy, told = plan.admission.policy, []
    for route in policy.routes:
        feature = policy.features.get(route.feature or "")
        if feature is not None and feature.native and tokens in route.tokens:
            obstacles = plan.admission.decision(route.feature or route.name).obstacles
            told.append(f"{route.name}: " + "; ".join(map(finding_text, obstacles)))
    return " | ".join(told) or f"policy {policy.name} has no native route for {tokens} tokens"


def finding_text(finding: Finding) -> str:
    return f"{finding.check}: {obstacle_text(finding)} {reason_name(finding)}".rstrip()


def require_dependent(backend: NativeBackend, device: str) -> None:
    """Raise BackendError that says why this backend's kernels do not overlap here."""
    launcher = backend.launcher(device)
    if int(launcher.architecture.removeprefix("sm_")) < DEPENDENT_FROM:
        raise BackendError(f"{launcher.architecture} has no dependent launch: sm_{DEPENDENT_FROM} is the first")
    if not backend.dependent:
        raise BackendError("dependent launch is off: SM70_MOE_DEPENDENT_LAUNCH=0")
    if not backend._may_depend(launcher):
        raise BackendError("dependent launch failed its self-test on this device")
