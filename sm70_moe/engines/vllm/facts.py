"""What a vLLM layer says about itself, as facts for admission.

Host objects are `Any`: vLLM is not installed where this package is checked.
"""

from __future__ import annotations

from typing import Any

from sm70_moe.checkpoint.names import MATRICES, layer_index
from sm70_moe.checkpoint.quantization import Quantization, QuantizationRules
from sm70_moe.errors import BackendError
from sm70_moe.facts import LayerFacts


def matrix_names(layer: Any) -> dict[str, str]:
    """The checkpoint's names of gate, up and down; a layer without a gate has none for it."""
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return {matrix: name for matrix, name in zip(MATRICES, names, strict=True) if name}


def declared(rules: QuantizationRules, layer: Any, prefix: str) -> Quantization:
    """What the checkpoint declares for the experts of a layer; format "mixed" if they differ."""
    return rules.of_layer(prefix, range(layer.moe_config.num_experts), tuple(matrix_names(layer).values()))


def layer_facts(layer: Any, prefix: str, quantization: Quantization, host: Any) -> LayerFacts:
    """Facts of a `RoutedExperts` layer of an engine with the `VllmConfig` `host`."""
    moe = layer.moe_config
    ranks = moe.moe_parallel_config
    draft = getattr(host, "speculative_config", None)
    return LayerFacts(
        layer=prefix,
        index=layer_index(prefix),
        hidden=moe.hidden_dim,
        intermediate=moe.intermediate_size,
        experts=moe.num_experts,
        top_k=moe.experts_per_token,
        format=quantization.format,
        packing=quantization.packing,
        bits=quantization.bits,
        zero_point=quantization.zero_point,
        checkpoint_group=quantization.group,
        activation=activation(layer),
        gated=moe.is_act_and_mul,
        bias=moe.has_bias,
        router_weight_on_input=layer.apply_router_weight_on_input,
        activations=str(moe.in_dtype).removeprefix("torch."),
        tensor_parallel=ranks.tp_size,
        tensor_rank=ranks.tp_rank,
        expert_parallel=ranks.ep_size if ranks.use_ep else 1,
        expert_rank=ranks.ep_rank if ranks.use_ep else 0,
        device=device_of(moe.device),
        max_sequences=host.scheduler_config.max_num_seqs,
        speculative_width=1 + (draft.num_speculative_tokens or 0) if draft else 1,
    )


def activation(layer: Any) -> str:
    """The name of the gate's activation; one that is clamped or scaled is another one."""
    name = str(getattr(layer.activation, "value", layer.activation))
    limit, alpha, beta = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
    said = [f"clamped at {limit:g}"] if limit else []
    said += [f"alpha {alpha:g}"] if alpha is not None else []
    said += [f"beta {beta:g}"] if beta is not None else []
    return " ".join((name, *said))


def device_of(device: Any) -> str:
    """ "cuda" is the process's current device: "cuda:1"."""
    import torch

    return str(torch.empty(0, device=device).device)


def require_known(layer: Any, prefix: str) -> None:
    """Refuse ways of spreading a layer that were never tried: each could give a wrong sum.

    Raises BackendError that names all of them.
    """
    moe, placed = layer.moe_config, layer.expert_map_manager
    ranks = moe.moe_parallel_config
    wrong = [
        f"{name} is {found!r}, accepted is {accepted!r}"
        for name, found, accepted in (
            ("data_parallel_size", ranks.dp_size, 1),
            ("prefill_context_parallel_size", ranks.pcp_size, 1),
            ("sequence parallel size", ranks.sp_size, 1),
            ("expert placement", placed.placement_strategy if ranks.use_ep else "linear", "linear"),
            ("number of fused shared experts", placed.num_fused_shared_experts, 0),
            ("number of experts with replicas", moe.num_experts, moe.num_logical_experts),
            ("padded hidden size", moe.hidden_dim, moe.hidden_dim_unpadded),
            ("padded intermediate size", moe.tp_shard_with_padding, False),
        )
        if found != accepted
    ]
    if wrong:
        raise BackendError(f"{prefix}: " + "; ".join(wrong))
