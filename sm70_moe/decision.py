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


class Reason(StrEnum):
    """Why a check did not pass. Closed: tests, dashboards and hints key on these."""

    # the operator
    FLAG_OFF = "flag off"
    FLAG_OFF_BY_DEFAULT = "flag off by default"
    FLAG_UNDECLARED = "the policy has no such flag"
    LAYER_DENIED = "layer denied"
    LAYER_NOT_ALLOWED = "layer not allowed"
    # the layer against the contract
    FORMAT = "format"
    BITS = "bits"
    ZERO_POINT = "zero point"
    EXPERTS = "experts"
    TOP_K = "top-k"
    HIDDEN = "hidden size"
    INTERMEDIATE = "intermediate size"
    TENSOR_PARALLEL = "tensor parallel"
    EXPERT_PARALLEL = "expert parallel"
    RANK = "rank outside of its group"
    GROUP_SIZE = "checkpoint group size"
    PREPARED_GROUP = "prepared group size"
    ACTIVATION = "activation"
    ACTIVATION_DTYPE = "activation dtype"
    # the layer against tensor parallelism
    GROUP_INDIVISIBLE = "group does not divide the matrix"
    SHARD_UNEVEN = "ranks do not divide the layer"
    SHARD_CUTS_GROUP = "shard cuts a group too finely"
    # other features
    NEED_NOT_ADMITTED = "a needed feature is not admitted"
    # other ranks
    RANKS_DISAGREE = "not admitted on every rank"
    # the machine
    DEVICE = "device"
    ARCHITECTURE = "architecture"
    BUILD_MISSING = "no native build"
    BUILD_STALE = "build id differs"
    ARCH_MISSING = "no image for this architecture"
    KERNEL_SIZES = "no kernel for these sizes"
    NOT_COOPERATIVE = "no cooperative launch"
    NOT_RESIDENT = "blocks do not fit at once"
    SELF_TEST_FAILED = "self-test failed"
    LAUNCH_REFUSED = "driver refused the launch"
    BACKEND_MISSING = "backend not installed"
    BACKEND_BROKEN = "backend does not load"
    LAYOUT_UNREADABLE = "backend does not read the bank layout"
    OPTION_UNSUPPORTED = "no backend has this option"
    # bookkeeping
    FACT_UNKNOWN = "fact unknown"
    CHECK_BROKE = "check broke"
    PREREQUISITE = "prerequisite did not pass"
    # drift
    ENVIRONMENT_CHANGED = "environment changed since"
    POLICY_CHANGED = "policy changed since"
    BUILD_CHANGED = "build changed since"
    MACHINE_CHANGED = "machine changed since"


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
        plain = observed is None or isinstance(observed, str | int | float)
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
    UNSUPPORTED = "unsupported"  # the last route, which has no flag, cannot run the layer either


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
        return self.outcome is Outcome.ADMITTED

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
