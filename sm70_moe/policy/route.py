"""Route: which backend takes which calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sm70_moe.policy.contract import Count, Dtype
from sm70_moe.policy.frozen import Frozen, refusal

TOKEN_FORMS = "a number from 1, [first, last] with first at most last, or { from = first }"


class OpenRange(Frozen):
    """`{ from = 128 }` of a policy file."""

    first: Count = Field(alias="from")


class TokenRange(Frozen):
    """Token counts from `first` to `last`, both included; `last` None has no end."""

    first: Count
    last: Count | None

    @model_validator(mode="after")
    def ordered(self) -> TokenRange:
        if self.last is not None and self.last < self.first:
            raise refusal(f"first at most last, not {self.first} > {self.last}")
        return self

    def __contains__(self, tokens: object) -> bool:
        return isinstance(tokens, int) and self.first <= tokens and (self.last is None or tokens <= self.last)

    def __str__(self) -> str:
        if self.last == self.first:
            return str(self.first)
        return f"{self.first} and more" if self.last is None else f"{self.first}-{self.last}"


def whole(value: object) -> bool:
    """Is it an integer? In Python a bool is one as well, in a policy it is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_tokens(value: Any) -> Any:
    """Turn the three forms of a policy file into a range."""
    if isinstance(value, TokenRange):
        return value
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) == 2 and all(map(whole, ends)) and 1 <= ends[0] <= ends[1]:
        return TokenRange(first=ends[0], last=ends[1])
    if isinstance(value, dict):
        return TokenRange(first=OpenRange.model_validate(value).first, last=None)
    raise refusal(TOKEN_FORMS)


Tokens = Annotated[
    TokenRange,
    BeforeValidator(
        read_tokens,
        json_schema_input_type=Count | Annotated[list[Count], Field(min_length=2, max_length=2)] | OpenRange,
    ),
]
Shape = Annotated[tuple[Count, Count], Field(strict=False)]


def power_of_two(value: int) -> int:
    if value & (value - 1):
        raise refusal("a power of two from 1 to 256")
    return value


class CallConditions(Frozen):
    """What a call must look like, or it moves to the next route.

    `x` (M, H) are the activations; without a dtype they have that of the layer's engine. `ids` (M, k) are the
    selected experts, `weights` (M, k) the router's weights. `alignment` is in bytes.
    """

    x: Dtype | None = None
    ids: Literal["int32", "int64"]
    weights: Dtype
    contiguous: bool
    alignment: Annotated[int, Field(ge=1, le=256), AfterValidator(power_of_two)]
    x_shape: Shape | None = None
    ids_shape: Shape | None = None
    weights_shape: Shape | None = None


class Route(Frozen):
    """One way to run a layer. `order` is the order of the banks that it reads; None: whatever its backend reads."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    backend: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    feature: str | None = None
    tokens: Tokens = TokenRange(first=1, last=None)
    call: CallConditions | None = None
    order: Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")] | None = None

    @property
    def unconditional(self) -> bool:
        """Does it take every call of its token range, whatever the flags say?"""
        return self.feature is None and self.call is None
