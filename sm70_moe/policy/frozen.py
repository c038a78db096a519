"""What every part of a policy is built on: models and mappings that nobody can change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

K = TypeVar("K")
V = TypeVar("V")


class Frozen(BaseModel):
    """A model without unknown keys, conversions or later changes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without what was worked out of the original's fields: a digest kept would be the old one."""
        copy = super().model_copy(update=update, deep=deep)
        for name in vars(copy).keys() - type(self).model_fields.keys():
            del vars(copy)[name]
        return copy


class FrozenDict(dict[K, V]):
    """A dict that refuses changes and can be hashed; it pickles and serialises as a dict does."""

    def _refuse(self) -> NoReturn:
        raise TypeError("a policy is frozen: load another one instead of changing it")

    def __setitem__(self, key: object, value: object) -> NoReturn:
        self._refuse()

    def __delitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __ior__(self, other: object) -> NoReturn:  # type: ignore[misc]  # mypy wants dict's own return type
        self._refuse()

    def clear(self) -> NoReturn:
        self._refuse()

    def pop(self, *args: Any) -> NoReturn:
        self._refuse()

    def popitem(self) -> NoReturn:
        self._refuse()

    def setdefault(self, *args: Any) -> NoReturn:
        self._refuse()

    def update(self, *args: Any, **values: Any) -> NoReturn:
        self._refuse()

    def __hash__(self) -> int:  # type: ignore[override]  # dict has None here
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self),)


Table = Annotated[Mapping[K, V], AfterValidator(FrozenDict)]
"""A TOML table with free keys; keeps the order of the file."""

Tuple = Annotated[tuple[V, ...], Field(strict=False)]
"""A TOML array. Strictness stops at the array: pydantic would refuse every list; items stay strict."""

Line = Annotated[str, Field(pattern=r"^[^\r\n]*\S[^\r\n]*$")]
"""Text of one line that is not blank."""


def read_exact(value: Any) -> Any:
    """Keep true and 1.0 from passing as the literal 1, which they equal in Python."""
    if isinstance(value, bool | float):
        raise refusal("a whole number")
    return value


Exact = BeforeValidator(read_exact)
"""Beside a Literal of whole numbers."""


def refusal(accepted: str) -> PydanticCustomError:
    """The error of a validator of ours; `accepted` says what would have been right."""
    return PydanticCustomError("policy", "accepted {accepted}", {"accepted": accepted})
