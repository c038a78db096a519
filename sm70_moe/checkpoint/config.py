"""What config.json says about a model's mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm70_moe.checkpoint.fields import Fields
from sm70_moe.checkpoint.methods import read_quantization
from sm70_moe.checkpoint.quantization import QuantizationRules

CONFIG = "config.json"

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
"""`top_k` is not among them: generation settings use that name for sampling."""
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size")
DENSE_INTERMEDIATE = "intermediate_size"
"""Read where there is none of those: Mixtral and its kin have no dense layers."""
ACTIVATION = ("hidden_act", "hidden_activation")
CLAMP = "swiglu_limit"
"""Largest gate and up before the activation, in models that clamp them."""
DTYPE = ("dtype", "torch_dtype")

LARGEST_TOP_K = 2**16


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts of config.json; None where it is silent. Sizes count elements, `intermediate` per expert.

    `of_experts`: `intermediate` is said to be the experts', not just that of any feed-forward layer.
    `activation` says so if the model clamps it, which makes it another one.
    """

    model_type: str | None
    hidden: int | None
    intermediate: int | None
    experts: int | None
    top_k: int | None
    layers: int | None
    activation: str | None
    dtype: str | None
    quantization: QuantizationRules
    of_experts: bool = True


def read_config(folder: Path) -> ModelConfig:
    """Read config.json of a folder, with the language model's `text_config` in front of the rest.

    Raises CheckpointError for a file that cannot be read, a value of the wrong type, a count that is
    not positive or absurd, and two names of one fact that contradict each other.
    """
    whole = Fields.load(folder / CONFIG)
    text = whole.table("text_config")
    fields = whole if text is None else text.before(whole)
    intermediate = fields.count(*INTERMEDIATE, lists=True)
    experts = fields.count(*EXPERTS, lists=True)
    return ModelConfig(
        model_type=whole.text("model_type"),
        hidden=fields.count("hidden_size"),
        intermediate=fields.count(DENSE_INTERMEDIATE) if intermediate is None else intermediate,
        experts=experts,
        top_k=_top_k(fields, experts),
        layers=fields.count("num_hidden_layers"),
        activation=_activation(fields),
        dtype=_dtype(fields.text(*DTYPE)),
        quantization=read_quantization(fields),
        of_experts=intermediate is not None,
    )


def _top_k(fields: Fields, experts: int | None) -> int | None:
    found = fields.count(*TOP_K, lists=True, largest=LARGEST_TOP_K)
    if found is not None and experts is not None and found > experts:
        raise fields.owner(*TOP_K).fault(fields.name(*TOP_K), found, f"at most the number of experts, {experts}")
    return found


def _activation(fields: Fields) -> str | None:
    name, limit = fields.text(*ACTIVATION), fields.number(CLAMP)
    return name if name is None or not limit else f"{name} clamped at {limit:g}"


def _dtype(name: str | None) -> str | None:
    """ "auto" states nothing; a name may carry torch's prefix."""
    return None if name is None or name == "auto" else name.removeprefix("torch.")
