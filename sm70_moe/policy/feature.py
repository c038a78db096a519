"""Feature: what one flag decides over, and which checks it insists on."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from sm70_moe.policy.frozen import Frozen, Line, Tuple, refusal
from sm70_moe.policy.wording import one_of


class Check(StrEnum):
    """A part of the contract that a feature can insist on. Closed: there is no expression language."""

    FORMAT = "format"
    BITS = "bits"
    ZERO_POINT = "zero_point"
    EXPERTS = "experts"
    TOP_K = "top_k"
    HIDDEN = "hidden"
    INTERMEDIATE = "intermediate"
    TENSOR_PARALLEL = "tensor_parallel"
    EXPERT_PARALLEL = "expert_parallel"
    CHECKPOINT_GROUP = "checkpoint_group"
    PREPARED_GROUP = "prepared_group"
    ACTIVATION = "activation"
    ACTIVATIONS = "activations"
    ARCHITECTURE = "architecture"


SHORTHANDS: dict[str, tuple[Check, ...]] = {
    "contract": tuple(Check),
    "geometry": (Check.HIDDEN, Check.INTERMEDIATE),
}
"""Words of a policy file that stand for several checks."""

WORDS = (*SHORTHANDS, *(check.value for check in Check))


def read_word(word: str) -> str:
    if word not in WORDS:
        raise refusal(one_of(word, WORDS))
    return word


Words = Tuple[Annotated[str, AfterValidator(read_word), WithJsonSchema({"enum": list(WORDS)})]]
_READER = TypeAdapter(Words)


def expand(words: Iterable[str]) -> tuple[Check, ...]:
    """Checks that the words stand for, each once, in the order of `Check`."""
    meant = {check for word in words for check in SHORTHANDS.get(word) or (Check(word),)}
    return tuple(check for check in Check if check in meant)


def read_checks(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Turn the words of a file into checks; a wrong word is reported at its place in the array."""
    return validate(expand(_READER.validate_python(value)))


FeatureName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""A flag is named after its feature, `SM70_MOE_<NAME>`: hence no dots or dashes."""

Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
Checks = Annotated[tuple[Check, ...], WrapValidator(read_checks, json_schema_input_type=Words)]


class Feature(Frozen):
    """A route, a bank layout or an option that an operator can demand or switch off.

    `env` are variables beside `SM70_MOE_<NAME>`, which every feature has. `unset` is the state
    when no variable is set. `needs` are features that must be admitted first. While it is
    unset, a feature does not step in for those of `unless_off` that the operator switched off. `metadata` and
    `batches` say what the banks become when a layout feature is admitted.
    """

    kind: Literal["route", "layout", "option"]
    doc: Line
    env: Tuple[Variable] = ()
    unset: Literal["auto", "off"] = "auto"
    needs: Tuple[str] = ()
    unless_off: Tuple[str] = ()
    checks: Checks = ()
    native: bool = False
    interleaves_w13: bool = False
    layer_lists: bool = False
    metadata: Literal["3-byte", "2.5-byte"] | None = None
    batches: bool = False
