"""What config.json says about a model's mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm70_moe.weights.fields import Fields
from sm70_moe.weights.quantization import QuantizationRules, read_quantization

CONFIG = "config.json"

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
"""`top_k` is not among them: generation settings use that name for sampling."""
INTERMEDIATE = "moe_intermediate_size"
DENSE_INTERMEDIATE = "intermediate_size"
"""Read where there is no `moe_intermediate_size`: Mixtral and its kin have no dense layers."""
ACTIVATION = ("hidden_act", "hidden_activation")
DTYPE = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts of config.json; None where it is silent. Sizes count elements, `intermediate` per expert."""

    model_type: str | None
    hidden: int | None
    intermediate: int | None
    experts: int | None
    top_k: int | None
    layers: int | None
    activation: str | None
    dtype: str | None
    quantization: QuantizationRules


def read_config(folder: Path) -> ModelConfig:
    """Read config.json of a folder, with the language model's `text_config` in front of the rest.

    Raises CheckpointError for a file that cannot be read, a value of the wrong type, and two names
    of one fact that contradict each other.
    """
    whole = Fields.load(folder / CONFIG)
    text = whole.table("text_config")
    fields = whole if text is None else text.before(whole)
    intermediate = fields.integer(INTERMEDIATE)
    return ModelConfig(
        model_type=whole.text("model_type"),
        hidden=fields.integer("hidden_size"),
        intermediate=fields.integer(DENSE_INTERMEDIATE) if intermediate is None else intermediate,
        experts=fields.integer(*EXPERTS),
        top_k=fields.integer(*TOP_K),
        layers=fields.integer("num_hidden_layers"),
        activation=fields.text(*ACTIVATION),
        dtype=_dtype(fields.text(*DTYPE)),
        quantization=read_quantization(fields),
    )


def _dtype(name: str | None) -> str | None:
    """ "auto" states nothing; a name may carry torch's prefix."""
    return None if name is None or name == "auto" else name.removeprefix("torch.")
