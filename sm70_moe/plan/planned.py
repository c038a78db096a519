"""PlannedRoute: a route of a policy with what it was decided to launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sm70_moe.facts import CallFacts
from sm70_moe.kernels.build.images import Choice
from sm70_moe.kernels.capability import Capability
from sm70_moe.policy import CallConditions, Route, TokenRange


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """One admitted route of one layer. `choice` is in the plan's digest, so that ranks agree on it.

    `ability` is what its backend runs there: a call that it does not take goes to the next route.
    """

    route: Route
    choice: Choice = field(default_factory=Choice)
    ability: Capability | None = None

    @property
    def name(self) -> str:
        return self.route.name

    @property
    def backend(self) -> str:
        return self.route.backend

    @property
    def tokens(self) -> TokenRange:
        return self.route.tokens

    @property
    def call(self) -> CallConditions | None:
        return self.route.call

    def takes(self, call: CallFacts) -> bool:
        """Do dtypes, strides, alignment and, where given, shapes meet the route's conditions and its backend's?"""
        conditions = self.call
        return (conditions is None or accepts(conditions, call)) and (self.ability is None or self.ability.takes(call))

    def __str__(self) -> str:
        """As it stands in a digest: name, backend, tokens, choice."""
        tokens = f"{self.tokens.first}-{self.tokens.last or ''}"
        return " ".join(filter(None, (self.name, self.backend, tokens, str(self.choice))))


def accepts(conditions: CallConditions, call: CallFacts) -> bool:
    """Do dtypes, strides, alignment and, where given, shapes of a call meet a route's conditions?"""
    x, ids, weights, out = call.x, call.ids, call.weights, call.out
    if conditions.x not in (None, x.dtype) or ids.dtype != conditions.ids or weights.dtype != conditions.weights:
        return False
    if conditions.contiguous and not (
        x.contiguous and ids.contiguous and weights.contiguous and (out is None or out.contiguous)
    ):
        return False
    least = conditions.alignment
    if x.alignment < least or (out is not None and out.alignment < least):
        return False
    return (
        (conditions.x_shape is None or x.shape == conditions.x_shape)
        and (conditions.ids_shape is None or ids.shape == conditions.ids_shape)
        and (conditions.weights_shape is None or weights.shape == conditions.weights_shape)
    )
