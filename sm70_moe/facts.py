"""What an engine tells about a layer (once) and about a call (every time).

`None` means that the engine did not say. It is never read as a default, and never passes a check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from sm70_moe.decision import Plain
from sm70_moe.errors import FactsError

PLAIN = "plain"
"""An arithmetic that activation, gated, bias and router weight say all of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One mixture-of-experts layer as one rank sees it.

    Sizes are counts of elements. `intermediate` is the *whole* layer's size, before tensor
    parallelism; `intermediate_per_rank` divides it. `experts` counts the experts of the whole
    layer, wherever they live. An engine that gives the four facts of the arithmetic has said all, so
    `arithmetic` need only be given by who knows more, or less.
    """

    layer: str
    index: int | None = None
    # geometry
    hidden: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    top_k: int | None = None
    # quantisation: "awq" with packing "gemm"; "none" for an unquantised layer
    format: str | None = None
    packing: str | None = None
    bits: int | None = None
    zero_point: bool | None = None
    checkpoint_group: int | None = None
    # arithmetic
    activation: str | None = None  # of the gate; "silu"
    gated: bool | None = None
    bias: bool | None = None
    router_weight_on_input: bool | None = None
    arithmetic: str | None = (
        PLAIN  # what the experts compute beyond these four, which the routes do not; None: not known
    )
    doubt: str = ""  # why one of the facts above is not known: what was read where
    activations: str | None = None  # dtype of x: "float16", "bfloat16", "float32"
    # parallelism
    tensor_parallel: int | None = None
    tensor_rank: int | None = None
    expert_parallel: int | None = None
    expert_rank: int | None = None
    # where it runs: "cuda:1", "cpu"
    device: str | None = None
    architecture: str | None = (
        None  # of that GPU, "sm_70", if the engine has asked CUDA; else the machine's word counts
    )
    # what the engine will send: sizes the resident scratch
    max_sequences: int | None = None
    speculative_width: int | None = None

    def __post_init__(self) -> None:
        for name, kind in FACT_TYPES.items():
            value = getattr(self, name)
            # exactly: a bool is no number, and numpy's or torch's values do not survive a record
            if value is not None and type(value) is not kind:
                raise FactsError(
                    f"fact {name}={value!r} is a {type(value).__name__}; accepted: {kind.__name__} or None"
                )
        if self.architecture is not None and not re.fullmatch("sm_[0-9]{2,3}", self.architecture):
            raise FactsError(
                f'fact architecture={self.architecture!r}: accepted is "sm_" and two or three digits, or None'
            )
        for name in ("max_sequences", "speculative_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FactsError(f"fact {name}={value}: accepted is at least 1, or None")

    @property
    def intermediate_per_rank(self) -> int | None:
        """Intermediate size of one rank; None if unknown or not a whole number."""
        if self.intermediate is None or not self.tensor_parallel:
            return None
        whole, rest = divmod(self.intermediate, self.tensor_parallel)
        return None if rest else whole

    @property
    def alike(self) -> Alike:
        """Everything but the layer's name and index: what the layers of a model have in common."""
        return _alike(self)

    @classmethod
    def of(cls, alike: Alike) -> LayerFacts:
        """A layer without a name or an index that has these facts."""
        return cls(layer="", **dict(zip(_ALIKE, alike, strict=True)))

    def record(self) -> dict[str, Plain]:
        return asdict(self)


Alike = tuple[Any, ...]
"""Facts without name and index, in the order of the fields; two layers with equal ones get equal findings."""

_ALIKE = tuple(field.name for field in fields(LayerFacts) if field.name not in ("layer", "index"))
_alike: Callable[[LayerFacts], Alike] = attrgetter(*_ALIKE)

FACT_TYPES: Mapping[str, type] = MappingProxyType(
    {field.name: {"bool": bool, "int": int, "str": str}[str(field.type).split(" ")[0]] for field in fields(LayerFacts)}
)
"""The type of each fact, from the annotations."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One argument of a call, by what can be read without touching its values.

    `strides` count elements. `alignment` is the largest power of two, up to 256, that divides the
    address in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    contiguous: bool

    @classmethod
    def packed(cls, dtype: str, *shape: int, alignment: int = 256) -> TensorFacts:
        """Facts of a contiguous tensor of this dtype and shape."""
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= max(size, 1)
        return cls(dtype, shape, tuple(strides), alignment, True)

    @classmethod
    def of(cls, tensor: Any) -> TensorFacts:
        """Facts of a torch tensor; reads no value and starts no work on a device."""
        address = tensor.data_ptr() | 256
        return cls(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.stride(),
            address & -address,
            tensor.is_contiguous(),
        )


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call: x (M, H), ids (M, k), router weights (M, k) and the output (M, H)."""

    x: TensorFacts
    ids: TensorFacts
    weights: TensorFacts
    out: TensorFacts | None = None

    @property
    def tokens(self) -> int:
        """M, the physical number of rows; a padded row counts."""
        return self.x.shape[0]

    @classmethod
    def usual(cls, tokens: int, hidden: int, top_k: int, dtype: str = "float16") -> CallFacts:
        """The call that a well-behaved engine makes."""
        return cls(
            TensorFacts.packed(dtype, tokens, hidden),
            TensorFacts.packed("int32", tokens, top_k),
            TensorFacts.packed("float32", tokens, top_k),
            TensorFacts.packed(dtype, tokens, hidden),
        )
