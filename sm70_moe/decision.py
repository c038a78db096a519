"""The vocabulary of a verdict: what was checked, how it came out, and why.

Everything here converts to plain JSON types with `record()`; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import isfinite
from typing import NoReturn

Plain = str | int | float | bool | None | Sequence["Plain"] | Mapping[str, "Plain"]
"""A value that `json.dumps` writes without help."""


class Status(StrEnum):
    """How one check came out. Only `PASS` is a pass."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"  # the engine or the machine did not say
    ERROR = "error"  # the check itself broke
    SKIPPED = "skipped"  # a prerequisite did not pass


class Scope(StrEnum):
    """Where a reason lies: what has to change for the check to pass."""

    OPERATOR = "operator"  # flags, lists and variables: the same for every layer, or said of one by name
    POLICY = "policy"  # the policy file
    LAYER = "layer"  # this layer: another layer of the same model may differ
    MACHINE = "machine"  # devices, build, backends
    RANKS = "ranks"  # another rank of the engine
    CHECK = "check"  # nobody knows: a fact is missing, or the check itself did not work


class Reason(StrEnum):
    """Why a check did not pass. Closed: tests, dashboards and hints key on these.

    Every reason has its `scope`: one that is added cannot be forgotten in a list elsewhere.
    """

    scope: Scope

    def __new__(cls, text: str, scope: Scope) -> Reason:
        made = str.__new__(cls, text)
        made._value_, made.scope = text, scope
        return made

    # the operator
    FLAG_OFF = "flag off", Scope.OPERATOR
    FLAG_OFF_BY_DEFAULT = "flag off by default", Scope.OPERATOR
    FLAG_UNDECLARED = "the policy has no such flag", Scope.OPERATOR
    LAYER_DENIED = "layer denied", Scope.LAYER
    LAYER_NOT_ALLOWED = "layer not allowed", Scope.LAYER
    # the layer against the contract, or against what a backend can run
    FORMAT = "format", Scope.LAYER
    BITS = "bits", Scope.LAYER
    ZERO_POINT = "zero point", Scope.LAYER
    EXPERTS = "experts", Scope.LAYER
    TOP_K = "top-k", Scope.LAYER
    HIDDEN = "hidden size", Scope.LAYER
    INTERMEDIATE = "intermediate size", Scope.LAYER
    TENSOR_PARALLEL = "tensor parallel", Scope.OPERATOR
    EXPERT_PARALLEL = "expert parallel", Scope.OPERATOR
    RANK = "rank outside of its group", Scope.OPERATOR
    GROUP_SIZE = "checkpoint group size", Scope.LAYER
    PREPARED_GROUP = "prepared group size", Scope.LAYER
    ACTIVATION = "activation", Scope.LAYER
    ACTIVATION_DTYPE = "activation dtype", Scope.OPERATOR
    # the layer against tensor parallelism, and against the order of its banks
    GROUP_INDIVISIBLE = "group does not divide the matrix", Scope.LAYER
    SHARD_UNEVEN = "ranks do not divide the layer", Scope.LAYER
    SHARD_CUTS_GROUP = "shard cuts a group too finely", Scope.LAYER
    BANK_SIZES = "the bank order does not hold these sizes", Scope.LAYER
    # other features
    NEED_NOT_ADMITTED = "a needed feature is not admitted", Scope.POLICY
    # other ranks
    RANKS_DISAGREE = "not admitted on every rank", Scope.RANKS
    # the machine
    DEVICE = "device", Scope.MACHINE
    ARCHITECTURE = "architecture", Scope.MACHINE
    BUILD_MISSING = "no native build", Scope.MACHINE
    BUILD_STALE = "build id differs", Scope.MACHINE
    ARCH_MISSING = "no image for this architecture", Scope.MACHINE
    KERNEL_SIZES = "no kernel for these sizes", Scope.LAYER
    NOT_COOPERATIVE = "no cooperative launch", Scope.MACHINE
    NOT_RESIDENT = "blocks do not fit at once", Scope.MACHINE
    SELF_TEST_FAILED = "self-test failed", Scope.MACHINE
    LAUNCH_REFUSED = "driver refused the launch", Scope.MACHINE
    BACKEND_MISSING = "backend not installed", Scope.MACHINE
    BACKEND_BROKEN = "backend does not load", Scope.MACHINE
    OPTION_UNSUPPORTED = "no backend has this option", Scope.MACHINE
    # what a backend is declared to run
    LAYOUT_UNREADABLE = "backend does not read the bank layout", Scope.POLICY
    TOKENS = "backend does not run these token counts", Scope.POLICY
    # what a backend does with the layer's own banks
    PROOF_FAILED = "wrong on the layer's own weights", Scope.MACHINE
    # bookkeeping
    FACT_UNKNOWN = "fact unknown", Scope.CHECK
    CHECK_BROKE = "check broke", Scope.CHECK
    PREREQUISITE = "prerequisite did not pass", Scope.CHECK
    # drift
    ENVIRONMENT_CHANGED = "environment changed since", Scope.OPERATOR
    POLICY_CHANGED = "policy changed since", Scope.POLICY
    BUILD_CHANGED = "build changed since", Scope.MACHINE
    MACHINE_CHANGED = "machine changed since", Scope.MACHINE


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and its result.

    Make one with `passed`, `failed`, `unknown`, `broke` or `skipped`: a finding that is not a pass
    cannot be made without a reason. `expected` and `observed` are plain values.
    """

    check: str
    status: Status
    reason: Reason | None = None
    expected: Plain = None
    observed: Plain = None
    hint: str = ""

    def __post_init__(self) -> None:
        if (self.status is Status.PASS) != (self.reason is None):
            raise ValueError(f"finding {self.check!r}: status {self.status} with reason {self.reason}")

    def __bool__(self) -> NoReturn:
        raise TypeError("a finding has five statuses and is no truth value; compare .status")

    @staticmethod
    def passed(check: str, observed: Plain = None) -> Finding:
        # nearly all findings of a model with 48 alike layers are the same few passes
        plain = observed is None or isinstance(observed, _CACHED)
        return _pass(check, observed) if plain else Finding(check, Status.PASS, observed=observed)

    @classmethod
    def failed(
        cls, check: str, reason: Reason, expected: Plain = None, observed: Plain = None, hint: str = ""
    ) -> Finding:
        return cls(check, Status.FAIL, reason, expected, observed, hint)

    @classmethod
    def unknown(
        cls, check: str, expected: Plain = None, hint: str = "", reason: Reason = Reason.FACT_UNKNOWN
    ) -> Finding:
        return cls(check, Status.UNKNOWN, reason, expected, None, hint)

    @classmethod
    def broke(cls, check: str, error: BaseException) -> Finding:
        return cls(check, Status.ERROR, Reason.CHECK_BROKE, None, f"{type(error).__name__}: {error}")

    @classmethod
    def skipped(cls, check: str, because: str) -> Finding:
        return cls(check, Status.SKIPPED, Reason.PREREQUISITE, None, because)

    def record(self) -> dict[str, Plain]:
        return {
            "check": self.check,
            "status": self.status.value,
            "reason": self.reason.name if self.reason else None,
            "expected": plain(self.expected),
            "observed": plain(self.observed),
            "hint": self.hint,
        }


_CACHED = (str, int, float)  # a union in its place would be made anew for every pass


@lru_cache(maxsize=1024, typed=True)
def _pass(check: str, observed: str | int | float | None) -> Finding:
    """One object for equal passes; `typed`, since True is not 1 to a reader."""
    return Finding(check, Status.PASS, observed=observed)


class Outcome(StrEnum):
    """What became of a feature for one layer."""

    ADMITTED = "admitted"
    FELL_BACK = "fell back"  # flag auto, something stopped it
    OFF = "off"  # flag 0, or off by default
    REFUSED = "refused"  # flag 1 and something stopped it
    NOT_OURS = "not ours"  # the layer is not quantised: no flag speaks about it
    UNSUPPORTED = "unsupported"  # the last route, which has no flag, cannot run the layer either


_ADMITTED = Outcome.ADMITTED  # reading a member through its class is slow, and this is asked most


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict over one feature of one layer, with every finding.

    `flag` is the state (`auto`, `require`, `off`) and `flag_source` where it came from; both are
    None for a route without a flag.
    """

    feature: str
    kind: str
    outcome: Outcome
    findings: tuple[Finding, ...]
    flag: str | None = None
    flag_source: str | None = None

    @property
    def admitted(self) -> bool:
        return self.outcome is _ADMITTED

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """Every finding that is not a pass."""
        return tuple(f for f in self.findings if f.status is not Status.PASS)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Reasons of the obstacles, skipped checks left out, in order of the checks."""
        return tuple(f.reason for f in self.obstacles if f.reason and f.status is not Status.SKIPPED)

    def record(self) -> dict[str, Plain]:
        return {
            "feature": self.feature,
            "kind": self.kind,
            "outcome": self.outcome.value,
            "flag": self.flag,
            "flag_source": self.flag_source,
            "findings": [f.record() for f in self.findings],
        }


def obstacle_text(finding: Finding) -> str:
    """ "expected 32, found 128", with the hint; says when nothing is known or nothing was checked."""
    if finding.status is Status.SKIPPED:
        text = f"skipped: {finding.observed}"
    elif finding.status is Status.UNKNOWN:
        text = f"expected {plain_text(finding.expected)}, not known"
    elif finding.status is Status.ERROR:
        text = f"the check broke: {finding.observed}"
    else:
        text = f"expected {plain_text(finding.expected)}, found {plain_text(finding.observed)}"
    return f"{text}; {finding.hint}" if finding.hint else text


def plain_text(value: Plain) -> str:
    """A plain value as a sentence has it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(plain_text(item) for item in value) or "none"
    return "yes" if value is True else "no" if value is False else str(value)


DEEPEST = 8
"""Levels of a value that a record keeps; what lies deeper is told as text."""

LONGEST = 1000
"""Characters of a text that stands for a value."""


def plain(value: object, depth: int = DEEPEST) -> Plain:
    """A value as plain JSON types, whatever a plug-in hands over: what has no counterpart is told as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if depth and isinstance(value, Mapping):
        return {key if isinstance(key, str) else text_of(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    if depth and isinstance(value, set | frozenset):
        return sorted(text_of(item) for item in value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return plain(getattr(value, "item", value.__str__)(), 0)
    return text_of(value)


def text_of(value: object) -> str:
    try:
        return str(value)[:LONGEST]
    except Exception as error:  # a plug-in's own class
        return f"{type(value).__name__} ({type(error).__name__})"
