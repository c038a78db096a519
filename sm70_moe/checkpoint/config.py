"""What config.json says about a model's mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm70_moe.checkpoint.arithmetic import Arithmetic, arithmetic_of
from sm70_moe.checkpoint.declaration import Declared, read_declaration
from sm70_moe.checkpoint.fields import Fields
from sm70_moe.checkpoint.model_types import ModelTypes, read_model_types
from sm70_moe.checkpoint.quantization import QuantizationRules

CONFIG = "config.json"

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
"""`top_k` is not among them: generation settings use that name for sampling."""
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size")
DENSE_INTERMEDIATE = "intermediate_size"
"""Read where there is none of those: Mixtral and its kin have no dense layers."""
DTYPE = ("dtype", "torch_dtype")

LARGEST_TOP_K = 2**16


DEEPEST = 4
"""Tables inside tables that are searched for experts."""
TEXT_TABLES = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where the language model of a larger one is declared, if no table declares experts."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts of config.json; None where it is silent. Sizes count elements, `intermediate` per expert.

    `of_experts`: `intermediate` is said to be the experts', not just that of any feed-forward layer.
    `width` is what the experts work on where the file says that it is not the hidden size. `kinds` are
    the numbers of experts of each kind, where it gives a list of them. `parts` are the tables that
    declare experts, if there are several, by path: `of` finds a layer's. `notes` tell where
    something was found that is not where it should be.
    """

    model_type: str | None
    hidden: int | None
    intermediate: int | None
    experts: int | None
    top_k: int | None
    layers: int | None
    dtype: str | None
    quantization: QuantizationRules
    of_experts: bool = True
    width: int | None = None
    kinds: tuple[int, ...] = ()
    path: str = ""
    parts: dict[str, ModelConfig] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    fields: Fields | None = field(default=None, repr=False, compare=False)
    types: ModelTypes | None = field(default=None, repr=False, compare=False)

    def of(self, layer: str) -> ModelConfig:
        """The part that a layer's name means: of several, that whose path has most words in common with it."""
        if len(self.parts) < 2:
            return self
        words = set(layer.lower().split("."))
        shared = {path: len(words & _words(path)) for path in self.parts}
        best = [path for path, count in shared.items() if count == max(shared.values())]
        return self.parts[best[0]] if len(best) == 1 else replace(self, top_k=None, fields=None)

    @property
    def places(self) -> str:
        """Where facts are looked up, for messages."""
        named = [path.rstrip(".") or "the top" for path in self.parts] or [self.path.rstrip(".") or "the top"]
        return f"{CONFIG}, {' and '.join(named)}"

    def arithmetic(self, index: int | None) -> Arithmetic:
        """What the experts of layer `index` compute; raises what `arithmetic_of` raises."""
        if self.fields is None or self.types is None:
            return Arithmetic(
                None, None, None, f"which table of {CONFIG} declares the layer is not known: {self.places}"
            )
        return arithmetic_of(self.fields, self.types, index)

    @property
    def activation(self) -> str | None:
        """That of the first layer."""
        return self.arithmetic(0).activation


def read_config(folder: Path, types: ModelTypes | None = None) -> ModelConfig:
    """Read config.json of a folder, and what stands beside it for its quantisation.

    `types` are the package's if not given. Raises CheckpointError for a file that cannot be read, a
    value of the wrong type, a count that is not positive or absurd, and two names of one fact that
    contradict each other.
    """
    return describe(Fields.load(folder / CONFIG), types, folder)


def describe(whole: Fields, types: ModelTypes | None = None, folder: Path | None = None) -> ModelConfig:
    """A whole config.json: every table that declares experts, each with those around it behind.

    Without a folder nothing is said of quantisation. Raises what `read_config` raises.
    """
    found = [table for table in _tables(whole) if any(table.values.get(name) is not None for name in EXPERTS)]
    if not found:
        inner = next((table for name in TEXT_TABLES if (table := whole.table(name)) is not None), None)
        found = [whole if inner is None else inner.before(whole)]
    declared = Declared(QuantizationRules()) if folder is None else read_declaration(whole, found, folder)
    known = types or read_model_types()
    parts = {one.path: _part(one, declared, known) for one in found}
    first = next(iter(parts.values()))
    model_type = whole.text("model_type") or first.model_type
    return replace(first, model_type=model_type, parts=parts if len(parts) > 1 else {})


def _tables(fields: Fields, depth: int = 0) -> Iterator[Fields]:
    """A table and those inside it, outer ones first; each has the ones around it behind."""
    yield fields
    for name, values in fields.values.items():
        if isinstance(values, dict) and "quant" not in str(name) and depth < DEEPEST:
            yield from _tables(Fields(fields.file, values, f"{fields.path}{name}.", fields), depth + 1)


def _words(path: str) -> set[str]:
    return {name.removesuffix("_config") for name in path.lower().rstrip(".").split(".")}


def _part(fields: Fields, declared: Declared, types: ModelTypes) -> ModelConfig:
    intermediate = fields.count(*INTERMEDIATE, lists=True)
    kinds = _kinds(fields)
    arithmetic_of(fields, types, 0)  # a value of the wrong type is told here and not layer by layer
    experts = sum(kinds) if kinds else fields.count(*EXPERTS, lists=True)
    return ModelConfig(
        model_type=fields.text("model_type"),
        hidden=fields.count("hidden_size"),
        intermediate=fields.count(DENSE_INTERMEDIATE) if intermediate is None else intermediate,
        experts=experts,
        top_k=_top_k(fields, experts),
        layers=fields.count("num_hidden_layers"),
        dtype=_dtype(fields.text(*DTYPE)),
        quantization=declared.rules,
        of_experts=intermediate is not None or _differing(fields),
        width=fields.count(*types.keys.width),
        kinds=kinds,
        path=fields.path,
        notes=declared.notes,
        fields=fields,
        types=types,
    )


def _kinds(fields: Fields) -> tuple[int, ...]:
    """The numbers of experts of each kind, where the sizes are a list with one for each; else none.

    A list of as many numbers as there are layers is one for each layer.
    """
    given = fields.value(fields.name(*EXPERTS))
    if not isinstance(given, list) or len(given) < 2 or any(type(one) is not int or one < 1 for one in given):
        return ()
    sizes = fields.value(fields.name(*INTERMEDIATE))
    per_layer = len(given) == fields.integer("num_hidden_layers")
    return () if per_layer or not isinstance(sizes, list) or len(sizes) != len(given) else tuple(given)


def _differing(fields: Fields) -> bool:
    return isinstance(fields.value(fields.name(*INTERMEDIATE)), list)


def _top_k(fields: Fields, experts: int | None) -> int | None:
    found = fields.count(*TOP_K, lists=True, largest=LARGEST_TOP_K)
    if found is not None and experts is not None and found > experts:
        raise fields.owner(*TOP_K).fault(fields.name(*TOP_K), found, f"at most the number of experts, {experts}")
    return found


def _dtype(name: str | None) -> str | None:
    """ "auto" states nothing; a name may carry torch's prefix."""
    return None if name is None or name == "auto" else name.removeprefix("torch.")
