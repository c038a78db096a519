"""The exceptions of this package.

Sm70MoeError
├── SettingsError       a variable, argument or option has a value that is not accepted
├── FactsError          an engine gave a fact of the wrong type, or one that makes no sense
├── PolicyError         a policy file is unreadable or invalid; lists every problem
├── CheckpointError     a checkpoint is incomplete, damaged or not what it says
├── AdmissionRefused    an explicit `1` could not be honoured; carries every decision
├── BackendError        a backend or call cannot run: wrong shapes, overlapping buffers
├── RankDisagreement    ranks hold different plans
└── DriftError          what the plan was made from has changed since
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sm70_moe.decision import Decision, Finding


class Sm70MoeError(Exception):
    """Base of all errors that this package raises on purpose.

    `lines` are its sentences, the text is all of them. What was given and is named in one may hold line ends of its
    own, so that the text alone does not say where a sentence ends.
    """

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        super().__init__("\n".join(map(str, lines)))


class SettingsError(Sm70MoeError):
    """A variable, argument or option has a value that is not accepted."""


class FactsError(Sm70MoeError):
    """An engine gave a fact of the wrong type, or one that makes no sense."""


class PolicyError(Sm70MoeError):
    """A policy cannot be used.

    `problems` holds one line for each problem: file, line, key path and what is accepted.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(*self.problems)

    def __reduce__(self) -> tuple[type[PolicyError], tuple[object, ...]]:
        return type(self), (self.problems,)


class CheckpointError(Sm70MoeError):
    """A checkpoint is incomplete, damaged or not what it says it is."""


class AdmissionRefused(Sm70MoeError):
    """A layer cannot be run as the operator demanded.

    `layer` is the layer's name, `decisions` are all decisions that were taken for it, admitted
    ones too, so that a handler needs no second look.
    """

    def __init__(self, layer: str, decisions: Sequence[Decision], *lines: str) -> None:
        self.layer = layer
        self.decisions = tuple(decisions)
        super().__init__(*lines)

    # an engine's workers send errors to the process that started them
    def __reduce__(self) -> tuple[type[AdmissionRefused], tuple[object, ...]]:
        return type(self), (self.layer, self.decisions, *self.lines)


class BackendError(Sm70MoeError):
    """A backend cannot be registered, found or called this way."""


class RankDisagreement(Sm70MoeError):
    """The ranks of one engine hold different plans."""


class DriftError(Sm70MoeError):
    """What a plan was made from has changed; `findings` says what."""

    def __init__(self, findings: Sequence[Finding], text: str) -> None:
        self.findings = tuple(findings)
        super().__init__(text)

    def __reduce__(self) -> tuple[type[DriftError], tuple[object, ...]]:
        return type(self), (self.findings, str(self))
