"""Contract: what a layer must be. A field that is None accepts anything."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sm70_moe.policy.frozen import Exact, Frozen, Tuple

Count = Annotated[int, Field(ge=1)]
Dtype = Literal["float16", "bfloat16", "float32"]
Architecture = Annotated[str, Field(pattern=r"^sm_[0-9]{2,3}$")]


class WeightContract(Frozen):
    """How the experts' weights are quantised.

    Groups count rows of K. `checkpoint_group` is what the files hold, `prepared_group` what a
    rank's banks get: equal, or finer where a tensor-parallel shard would cut a group.
    """

    format: Literal["awq", "compressed-tensors", "gptq"] | None = None
    packing: Annotated[str, Field(pattern=r"^[a-z0-9, -]+$")] | None = None
    bits: Annotated[Literal[4], Exact] | None = None
    zero_point: bool | None = None
    checkpoint_group: Count | None = None
    prepared_group: Count | None = None


class Contract(Frozen):
    """What a layer and its machine must be. `intermediate` is per rank, the others are whole."""

    architectures: Tuple[Architecture] | None = None
    tensor_parallel: Count | None = None
    expert_parallel: Count | None = None
    experts: Count | None = None
    top_k: Count | None = None
    hidden: Count | None = None
    intermediate: Count | None = None
    activation: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")] | None = None
    activations: Dtype | None = None
    weights: WeightContract = WeightContract()

    @property
    def whole_intermediate(self) -> int | None:
        """Intermediate size before tensor parallelism; None where the contract leaves it open."""
        if self.intermediate is None or self.tensor_parallel is None:
            return None
        return self.intermediate * self.tensor_parallel

    @property
    def any_geometry(self) -> bool:
        """Does it accept layers of every size?"""
        return self.hidden is self.intermediate is self.experts is self.top_k is None
