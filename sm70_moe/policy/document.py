"""Policy: a whole file, and its digest."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from sm70_moe.policy.contract import Contract, Count
from sm70_moe.policy.feature import Feature, FeatureName
from sm70_moe.policy.frozen import Exact, Frozen, Line, Table, Tuple, refusal
from sm70_moe.policy.route import Route

Bound = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def some(routes: tuple[Route, ...]) -> tuple[Route, ...]:
    if not routes:
        raise refusal("at least one [[route]]")
    return routes


Routes = Annotated[Tuple[Route], AfterValidator(some), Field(json_schema_extra={"minItems": 1})]


class Reactions(Frozen):
    """What to do when things do not agree.

    `mixed_model`: under `1`, may layers that differ from the contract fall back while others are
    admitted? `disagreement`: ranks hold different plans. `drift`: the environment, the build or
    the policy has changed when admission is closed.
    """

    mixed_model: Literal["refuse", "admit-the-rest"] = "refuse"
    disagreement: Literal["fall-back", "raise"] = "fall-back"
    drift: Literal["warn", "raise"] = "warn"


class Evidence(Frozen):
    """What was shown for a route, where it stands, and how far it goes.

    `bound` maps a matrix to its largest error as a fraction of the rounding bound.
    """

    route: str
    claim: Line
    source: Line
    limits: Line
    bound: Table[str, Bound] | None = None


class Policy(Frozen):
    """What a model's layers must be, the flags over them, and the routes in the order they are tried."""

    schema_number: Annotated[Literal[1], Exact] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")]
    revision: Count
    summary: Line
    contract: Contract
    features: Table[FeatureName, Feature] = Field(default={}, validate_default=True)
    routes: Routes = Field(alias="route")
    on: Reactions = Reactions()
    evidence: Tuple[Evidence] = ()

    _origin: str = PrivateAttr("")

    @property
    def origin(self) -> str:
        """Where it was read; empty for one made in memory. Not part of the digest."""
        return self._origin

    @classmethod
    def read(cls, document: Any, origin: str) -> Policy:
        """A policy from a parsed TOML document; raises pydantic's ValidationError."""
        policy = cls.model_validate(document)
        policy._origin = origin
        return policy

    def record(self) -> dict[str, Any]:
        """Its content as plain JSON values, defaults included, under the keys of the file."""
        return self.model_dump(mode="json", by_alias=True)

    @cached_property
    def order_of_need(self) -> tuple[str, ...]:
        """Feature names, each after those that it needs, options last; validation has excluded cycles."""
        features, done = self.features, dict[str, None]()

        def visit(name: str) -> None:
            if name not in done:
                for need in features[name].needs:
                    visit(need)
                done[name] = None

        for name in sorted(features, key=lambda name: features[name].kind == "option"):
            visit(name)
        return tuple(done)

    @cached_property
    def reading_order(self) -> tuple[str, ...]:
        """Routes as they are tried (a feature's by its name), then layouts and options."""
        return tuple(dict.fromkeys([*(route.feature or route.name for route in self.routes), *self.features]))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content in hexadecimal: format, comments and the order of keys do not count."""
        content = json.dumps(self.record(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()
